"""A real notebook, run cell by cell: an op is declared, called, edited and called again."""

import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `test` with nbclient is not installed")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

_IMPORTS = "import torch\nimport jitkern\nfrom jitkern.declare import Cpp, kernel"
_OP = '''
scale = kernel("nb::scale(Tensor x) -> Tensor", cpu=Cpp(text="""
template <typename T> void scale(T* out, const T* x, long n) {
  for (long i = 0; i < n; i++) out[i] = FACTOR * x[i];
}
"""))

@scale.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, x.numel())
    return out
'''
_CALL = "print(scale(torch.ones(3)).tolist())"
_TWICE = (
    'twice = jitkern.cpp_kernel(name="twice", text="void twice(float* x) { x[0] *= 2; }")\n'
    "x = torch.ones(1)\ntwice(x)\nprint(x.item())"
)


def _run(*cells):
    """Run cells in one process, which goes on after errors; returns what each cell printed."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=300, startup_timeout=300, allow_errors=True).execute()
    return ["".join(map(_text_of, cell.outputs)) for cell in notebook.cells]


def _text_of(output):
    if output.output_type == "error":
        return re.sub(r"\x1b\[[0-9;]*m", "", f"{output.ename}: {output.evalue}")
    return output.get("text", "")


@pytest.mark.long
def test_a_notebook_from_the_first_cell_to_an_edited_kernel():
    _, _, first, _, second, _, error, schema, twice = _run(
        _IMPORTS,
        _OP.replace("FACTOR", "2"), _CALL,
        _OP.replace("FACTOR", "3"), _CALL,
        _OP.replace("FACTOR", "nonsense"), _CALL,
        _OP.replace("Tensor x)", "Tensor x, int n)"),
        _TWICE,
    )  # fmt: skip
    assert first == "[2.0, 2.0, 2.0]\n"
    assert second == "[3.0, 3.0, 3.0]\n"
    assert re.search(r"Error: Cell In\[6\]:\d+: .*Cell In\[6\]:3:\d+: error: .*nonsense", error), (
        error
    )
    assert "DeclarationError: Cell In[8]:" in schema
    assert "restart the kernel" in schema
    assert twice == "2.0\n"
