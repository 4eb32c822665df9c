"""The CUDA source that KeOps generates for our formula, compiled by nvcc if installed.

KeOps itself compiles by NVRTC, and asks a device for its properties before. This leaves out NVRTC's
front end, the scheme for points of more than 146 dimensions (which depends on those properties),
the launch and the numbers. It shows that KeOps translates the formula for CUDA, and that NVIDIA's
compiler takes the result for a device of compute capability 8.0.
"""

import shutil
import subprocess
from unittest import mock

import pytest

from nmer_torchrl.neighbors.keops import _genred, _import_pykeops

_import_pykeops()
from keopscore.config import cuda_config  # noqa: E402
from pykeops.common.parse_type import get_type  # noqa: E402


def cuda_source(d: int, norms: int, k: int) -> str:
    """Returns what KeOps would pass to NVRTC for float32 points on a device."""
    with mock.patch.object(cuda_config, "get_cuda_version", return_value=13_000):
        from keopscore.mapreduce import gpu

    reduction = _genred(d, norms, k)
    types = [get_type(alias, position_in_list=i) for i, alias in enumerate(reduction.aliases)]
    aliases = [f"{name}=Var({place},{width},{kind})" for name, kind, width, place in types]
    on_device, plain = (1, 1, 0), (0, 0, 0)
    binder = gpu.GpuReduc1D.__mro__[2]
    with mock.patch.object(binder, "__init__", return_value=None):  # which looks for a device
        made = gpu.GpuReduc1D(
            reduction.formula,
            aliases,
            len(aliases),
            "float",
            "float",
            "direct_sum",
            *on_device,
            *plain,
        )
    made.get_code()
    return made.code


@pytest.mark.parametrize(("d", "norms"), [(23, 1), (23, 2), (113, 1)])
def test_the_formula_becomes_cuda_source_that_nvcc_compiles(d, norms, tmp_path):
    source = tmp_path / "formula.cu"
    source.write_text(cuda_source(d, norms, 11))
    assert 'extern "C" __global__ void GpuConv1DOnDevice' in source.read_text()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed; the source was generated")
    command = [nvcc, "-cubin", "-arch=sm_80", str(source), "-o", str(tmp_path / "formula.cubin")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "formula.cubin").stat().st_size > 1_000
