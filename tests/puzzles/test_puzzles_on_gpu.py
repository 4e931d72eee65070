"""Right answers run on a GPU as they do in the simulator."""

import pytest
from answer_files import right

from epmoe.puzzles import on_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("number", [3, 15, 16])
def test_a_right_answer_is_right_on_a_gpu(number, tmp_path):
    file = tmp_path / f"puzzle{number:02}.py"
    file.write_text(right(number)[0])
    what, says = on_gpu.verdict(number, file)
    assert what == "right" and "20 times each" in says, says
