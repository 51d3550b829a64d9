"""What of the kernel benchmark runs without a GPU; the copies themselves are tested in tests/transfer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import kernels
from benchmarks.kernels_report import Result, plot, table

MEMCPY = Result("d2h", "memcpy", "", 0, "bfloat16", 16384, False, 55.0, 1.0, 54.0, 0.98, 1.01, True)
STAGED = Result("d2h", "staged", "", 64, "bfloat16", 16384, False, 54.0, 0.982, 53.0, 0.964, 1.02, True)
TRITON = replace(STAGED, direction="h2d", backend="triton", detail="12 blocks", scattered=True)


def shown(results: list[Result]) -> str:
    console = Console(width=170, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(table(results, {"GPU": "none"}))
    return console.export_text()


def test_the_table_names_every_case() -> None:
    text = shown([MEMCPY, STAGED, TRITON])
    assert "GPU none" in text
    row = next(line for line in text.splitlines() if "triton" in line)
    for part in ("h2d", "64", "16,384", "scattered", "12 blocks", "54.0", "0.982", "53.0", "0.964", "1.02"):
        assert part in row


def test_what_was_not_measured_is_a_dash_and_wrong_bytes_are_loud() -> None:
    bare = replace(STAGED, busy_gbs=None, busy_of_memcpy=None, matmul=None, intact=False)
    row = next(line for line in shown([bare]).splitlines() if "staged" in line)
    assert row.count(" - ") == 3
    assert "WRONG BYTES" in row


@pytest.mark.parametrize("results", [[], [STAGED], [MEMCPY, STAGED, TRITON, replace(TRITON, matmul=None)]])
def test_the_plot_is_an_image(results: list[Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "kernels.png"
    plot(file, results)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100", "--page-size", "64"], "100 tokens are no whole pages of 64"),
        (["--json", "no-such-folder/x.json"], "no-such-folder is no folder"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--dtype", "int4"], ["--blocks", "many"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.main(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert kernels.main([]) == 2
    assert capsys.readouterr().err == "error: no CUDA GPU here; this benchmark measures one\n"
