"""No synchronisation of the kernels is missed: mutants cover everything that a text search finds."""

import ast
import re

import pytest

from epmoe.mutants import edited_kernels, hunt
from epmoe.mutants.harmless import HARMLESS
from epmoe.mutants.token_mutations import mutants_of, names_in

WORDS = re.compile(
    r"\b((?:ld|st|red_add|atomic_\w+?)_(?:relaxed|acquire|release|acq_rel)_(?:cta|gpu|sys)_\w+"
    r"|syncthreads\w*|syncwarp|fence_\w+|bulk_wait\w*|mbar_try_wait|shared_add_i32)(?=[(),\s])"
)


def code_only(source):
    """The source without imports, comments and docstrings; lines keep their numbers."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            or isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.partition("#")[0] for line in lines)


@pytest.mark.parametrize("file", edited_kernels.files())
def test_every_word_has_mutants(file):
    source = edited_kernels.source_of(file)
    lines = enumerate(code_only(source).splitlines(), 1)
    found = {(number, word) for number, line in lines for word in WORDS.findall(line)}
    covered = {(m.token.line, re.match(r"\w+", m.token.text)[0]) for m in mutants_of(file, source)}
    assert found <= covered


@pytest.mark.parametrize("make, most", [(hunt.all_mutants, 150), (hunt.statements_in_files, 80)])
def test_mutants_of_tokens_and_statements_compile_differ_and_have_names_of_their_own(make, most):
    mutants = make()
    assert len({m.key for m in mutants}) == len(mutants) > most
    for m in mutants:
        source = edited_kernels.source_of(m.token.file)
        edited = m.apply(source)
        assert edited != source and edited.count("\n") == source.count("\n")
        compile(edited, m.token.file, "exec")


def test_the_harmless_ones_are_mutants_that_there_are():
    assert set(HARMLESS) <= {m.key for m in (*hunt.all_mutants(), *hunt.statements_in_files())}


def test_no_word_is_lost_where_each_user_of_a_module_has_mutants_of_its_own():
    hunted = {(m.token.file, m.token.start) for m in hunt.all_mutants()}
    for file in edited_kernels.files():
        for m in mutants_of(file, edited_kernels.source_of(file)):
            assert (file, m.token.start) in hunted, m.key


SOURCE = """
def make():
    def f(flag, words):
        if syncthreads_or(not ok):
            return
        x = ld_acquire_sys_u64(flag)
        red_add_release_gpu_i32(words, i32(1))
        atomic_add_acq_rel_gpu_i32(words, 1)
        syncwarp()
        store_i32(words, i32(0))
        store_i32(words, x)
        atomic_cas_relaxed_gpu_i32(words, 0, 1)

wait = made_with(ld_acquire_gpu_u32)
"""


def test_each_token_is_broken_in_every_way():
    assert [(m.token.line, m.kind, m.new) for m in mutants_of("f.py", SOURCE)] == [
        (4, "barrier", "(not ok)"),
        (6, "order", "ld_relaxed_sys_u64"),
        (6, "scope", "ld_acquire_gpu_u64"),
        (6, "scope", "ld_acquire_cta_u64"),
        (6, "plain", "load_u64"),
        (7, "order", "red_add_relaxed_gpu_i32"),
        (7, "scope", "red_add_release_cta_i32"),
        (7, "plain", "plain_red_add_i32"),
        (8, "order", "atomic_add_acquire_gpu_i32"),
        (8, "order", "atomic_add_release_gpu_i32"),
        (8, "order", "atomic_add_relaxed_gpu_i32"),
        (8, "scope", "atomic_add_acq_rel_cta_i32"),
        (8, "plain", "plain_atomic_add_i32"),
        (9, "barrier", "pass"),
        (10, "reset", "pass"),
        (12, "plain", "plain_atomic_cas_i32"),
        (14, "order", "ld_relaxed_gpu_u32"),
        (14, "scope", "ld_acquire_cta_u32"),
        (14, "plain", "load_u32"),
    ]


def test_a_module_that_is_imported_is_no_use_of_a_function_of_its_name():
    source = "from . import peers, signal\n\nto = peers.make(cfg)\nfinish = signal.make(cfg)\n"
    assert "signal" not in names_in(source)
    assert "signal" in names_in(source + "to.signal(call, rank)\n")
