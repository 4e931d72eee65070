"""Checks of the shape of a launch, on a GPU and in the simulator alike."""

from operator import index

from epmoe_ref.errors import EPValueError


def checked(machine, kernel, grid, block, shared_bytes, static_shared=0):
    """(grid, block) as ints. EPValueError unless the machine can hold all blocks of the launch at once.

    static_shared: bytes of the kernel's own shared arrays, which count against the same limit as shared_bytes.
    """
    grid, block = index(grid), index(block)
    if not 1 <= block <= kernel.max_threads:
        raise EPValueError(f"block={block} threads: {kernel.name} takes 1 to {kernel.max_threads}")
    if grid < 1:
        raise EPValueError(f"grid={grid} blocks of {kernel.name}: at least 1 is needed")
    if static_shared + shared_bytes > machine.shared_limit:
        raise EPValueError(f"shared_bytes={shared_bytes} of {kernel.name}: a block has at most {machine.shared_limit}")
    limit = machine.max_resident_blocks(kernel, block, shared_bytes)
    if grid > limit:
        raise EPValueError(
            f"grid={grid} blocks of {block} threads of {kernel.name} cannot be resident at once: {machine.n_sms} "
            f"multiprocessors hold {limit}; blocks wait for each other, so take a smaller grid"
        )
    return grid, block
