"""docs/pages.md names everything that the four source pages name, and what it calls its own exists."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import epmoe
from epmoe import EPConfig, fused_a2a

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "pages.md").read_text()

# Every name of each page, in its order: types, functions, parameters, arguments, methods, fields.
NAMES = {
    "EPLocalSyncCounters": """
        EPLocalSyncCounters n_experts MAX_GPUS_PER_NODE ptr AnyType Copyable DevicePassable ImplicitlyCopyable
        ImplicitlyDestructible Movable RegisterPassable TrivialRegisterPassable device_type __init__ buffer get_type_name
        dispatch_async_size dispatch_wait_size combine_async_size combine_wait_size total_size get_dispatch_async_ptr
        get_dispatch_wait_ptr get_combine_async_ptr get_combine_wait_ptr""",
    "dispatch_kernel": """
        dispatch_kernel input_type num_threads input_tokens_layout topk_ids_layout row_offsets_layout expert_ids_layout
        src_info_layout n_sms n_experts n_ranks max_tokens_per_rank p2p_world_size token_fmt_type TokenFormat
        fused_shared_expert input_scales_wrapper skip_a2a use_shmem allreduce_world_size input_tokens topk_ids
        format_handler row_offsets expert_ids src_info send_buf_p shmem_alloc recv_buf_ptrs recv_count_ptrs ep_counters
        my_rank grouped_matmul dispatch_async dispatch_wait""",
    "combine_wait_kernel": """
        combine_wait_kernel output_type num_threads output_tokens_layout n_sms top_k n_experts n_ranks msg_bytes
        max_tokens_per_rank router_weights_wrapper token_idx topk_id elementwise_lambda_fn width alignment output_tokens
        recv_buf_p recv_count_p ep_counters my_rank combine_kernel MAX_FINITE""",
    "core.transformer.moe.fused_a2a": """
        FusedDispatch FusedCombine HybridEPDispatch HybridEPCombine get_hidden_bytes get_buffer init_hybrid_ep_buffer
        _buffer x group hidden_bytes Buffer forward ctx token_indices token_probs num_experts async_finish
        allocate_on_comm_stream backward grad_output grad_token_indices grad_token_probs grad_tokens_per_expert
        grad_handle handle previous_event _hybrid_ep_buffer hidden_dim seq_len num_local_experts num_sms_dispatch_api
        num_sms_combine_api fp8_dispatch routing_map probs num_permuted_tokens pad_multiple grad_x grad_probs
        grad_scaling_factor""",
}
CFG = EPConfig(n_ranks=2, n_experts=4, top_k=2, hidden=16, max_tokens_per_rank=4)
RESTATED = dict(n_sms=4, num_threads=64, n_experts=4, n_ranks=2, max_tokens_per_rank=4)


def scale(i):
    return 1.0


def weight(token, k, table):
    return table[token, k]


def store(token, col, value, table):
    table[token, col] = value


# The pages' compile-time parameters, as keywords; and their arguments, in their order.
FACTORIES = {
    "dispatch_kernel": dict(
        **RESTATED,
        input_type="bf16",
        p2p_world_size=2,
        token_fmt_type="bf16",
        fused_shared_expert=False,
        input_scales_wrapper=scale,
        skip_a2a=False,
        use_shmem=False,
        allreduce_world_size=CFG.allreduce_world_size,
    ),
    "combine_wait_kernel": dict(
        **RESTATED,
        output_type="bf16",
        top_k=2,
        msg_bytes=32,
        router_weights_wrapper=weight,
        elementwise_lambda_fn=store,
    ),
}
ARGUMENTS = {
    "dispatch_kernel": "input_tokens topk_ids format_handler row_offsets expert_ids src_info send_buf_p recv_buf_ptrs "
    "recv_count_ptrs ep_counters my_rank",
    "combine_wait_kernel": "output_tokens recv_buf_p recv_count_p ep_counters my_rank topk_ids",
}


def rows(page):
    """(names, here, why) of each line of a page's table."""
    section = TEXT[TEXT.index(f"\n## {page}\n") :].split("\n## ")[1]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, here, why = (cell.strip() for cell in line.strip("|").split("|"))
            yield re.findall(r"`(\w+)`", names), here, why


@pytest.mark.parametrize("page", NAMES)
def test_every_name_of_a_page_stands_in_its_table_once(page):
    told = [name for names, _, _ in rows(page) for name in names]
    assert sorted(told) == sorted(NAMES[page].split())


@pytest.mark.parametrize("page", NAMES)
def test_what_a_name_is_called_here_exists_or_it_is_said_why_not(page):
    for names, here, why in rows(page):
        if here == "none":
            assert why, names
        elif argument := re.fullmatch(r"argument of `(\w+)`", here):
            assert set(names) <= set(ARGUMENTS[argument[1]].split()), names
        elif argument := re.fullmatch(r"arguments of `(\w+)`", here):
            assert argument[1] in FACTORIES[page], names
        else:
            exists(*re.fullmatch(r"`([\w.]+)(?:\((\w+)=\))?`", here).groups())
        for also, keyword in re.findall(r"also `([\w.]+)\((\w+)=\)`", why):
            exists(also, keyword)


def exists(path, keyword):
    """A name of epmoe or epmoe_ref, and a keyword that it takes."""
    if path in FACTORIES and keyword in FACTORIES[path]:
        return
    first, *rest = path.split(".")
    value = getattr(epmoe, first, None) or getattr(fused_a2a, first, None) or import_module(first)
    for name in rest:
        if inspect.ismodule(value) and not hasattr(value, name):
            value = import_module(f"{value.__name__}.{name}")
        else:
            value = getattr(value, name)
    assert keyword is None or keyword in inspect.signature(value).parameters, (path, keyword)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_takes_the_page_s_parameters_and_its_kernel_the_page_s_arguments(name):
    kernel = getattr(epmoe, name)(CFG, **FACTORIES[name])
    assert list(kernel.page_arguments) == ARGUMENTS[name].split()


def test_docstrings_that_name_a_page_link_to_the_table():
    for folder in ("epmoe", "epmoe_ref"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s+", " ", path.read_text())
            for source in re.findall(r"Source: the (?!fused_silu)[\w. ]*?page.{50}", text):
                assert "(docs/pages.md)" in source, f"{path}: {source}"


def test_each_page_has_its_address():
    addresses = re.findall(r"^\| ([\w.]+), .* \| <(https://[^>]*)> \|$", TEXT, re.M)
    assert [name for name, _ in addresses] == list(NAMES)
    assert all(name in address for name, address in addresses)
