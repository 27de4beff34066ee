"""Execute the tutorials and store their outputs; `make notebooks` runs this.

    python docs/tutorials/execute.py [NAME ...] [--limit SECONDS] [--check]

The limit is for each notebook. An error in a cell, a notebook that takes longer, or a picture of more than 150 kB makes
the command fail. With `--check`, the files are left as they are.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

HERE = Path(__file__).resolve().parent
LARGEST = 150_000  # bytes of a picture
# Runs in the kernel before the first cell. Small pictures, and one thread: the models are small too.
SETUP = """
import torch as _torch
from matplotlib_inline.backend_inline import set_matplotlib_formats as _formats
import matplotlib.pyplot as _plt
_torch.set_num_threads(1)
_formats("png")
_plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True, "figure.figsize": (7.0, 3.2)})
"""


def execute(path: Path, limit: float) -> tuple[nbformat.NotebookNode, float]:
    """The notebook with new outputs, and the seconds that it took. The limit holds for all cells together."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False, coalesce_streams=True)
    begin = time.monotonic()
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.timeout = max(1, int(limit - (time.monotonic() - begin)))
            client.execute_cell(cell, index)
    del notebook.cells[0]
    code = (cell for cell in notebook.cells if cell.cell_type == "code")
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
    return notebook, time.monotonic() - begin


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """Sizes of the pictures in bytes, as stored."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [len(output["data"]["image/png"]) for output in outputs if "image/png" in output.get("data", ())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute the tutorials.")
    parser.add_argument("names", nargs="*", help="names of notebooks; all of them without any")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each notebook")
    parser.add_argument("--check", action="store_true", help="do not write the outputs")
    options = parser.parse_args(arguments)
    paths = [HERE / f"{name}.ipynb" for name in options.names] or sorted(HERE.glob("*.ipynb"))
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # silences the debugger of the kernel, which nobody uses here
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # pictures are outputs of cells
    failed, before = False, 0.0
    for path in paths:
        try:
            notebook, seconds = execute(path, options.limit)
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{path.stem}: {error}", file=sys.stderr)
            failed = True
            continue
        sizes = pictures(notebook)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor, before = usage.ru_utime + usage.ru_stime - before, usage.ru_utime + usage.ru_stime
        cost = f"{seconds:6.1f} s, {processor:6.1f} s of a processor"
        print(f"{path.stem:20} {cost}, {len(sizes)} pictures of up to {max(sizes, default=0):,} bytes", flush=True)
        if max(sizes, default=0) > LARGEST:
            print(f"{path.stem}: a picture has more than {LARGEST:,} bytes", file=sys.stderr)
            failed = True
        if not options.check:
            nbformat.write(notebook, path)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
