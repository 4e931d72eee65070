"""A contender with its phases captured into CUDA graphs, once, and replayed."""

from functools import partial


def capture(stream, launch):
    """The graph of what launch() puts on a stream, ready for replay(). Capturing runs nothing."""
    from epmoe.device.gpu_driver import check, cu

    check(cu.cuStreamBeginCapture(stream.handle, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        launch()
    finally:
        graph = check(cu.cuStreamEndCapture(stream.handle))
    return check(cu.cuGraphInstantiate(graph, 0))


def replay(graph, stream):
    """Put a graph on a stream."""
    from epmoe.device.gpu_driver import check, cu

    check(cu.cuGraphLaunch(graph, stream.handle))


class Captured:
    """The same phases, each a graph; they still alternate."""

    def __init__(self, contender):
        self._inner = contender
        self.name, self.phases, self.world = contender.name, contender.phases, contender.world
        self.shape, self.bytes, self.stream = contender.shape, contender.bytes, contender.stream
        for _ in range(2):  # compiles and allocates
            for phase in self.phases:
                contender.launch(phase)
        contender.check()
        self._graphs = {phase: capture(self.stream, partial(contender.launch, phase)) for phase in self.phases}

    def launch(self, phase):
        """Replay a phase."""
        replay(self._graphs[phase], self.stream)

    def check(self):
        """Raise the errors that the kernels recorded. Waits for them."""
        self._inner.check()

    def close(self):
        """Drop the graphs. The contender stays."""
        from epmoe.device.gpu_driver import check, cu

        for graph in self._graphs.values():
            check(cu.cuGraphExecDestroy(graph))
