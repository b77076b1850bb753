# SPDX-License-Identifier: Apache-2.0
"""A mesh shape that cannot be is refused before a process group starts."""
import pytest

from ms_dtensor import comm, init_device_mesh
from ms_dtensor.compat import hyper_parallel
from ms_dtensor.errors import MeshError

pytestmark = pytest.mark.usefixtures("cpu")


@pytest.fixture(autouse=True)
def _not_started():
    comm.shutdown()
    yield
    assert comm.current_world() is None


@pytest.mark.parametrize("shape", [(0,), (-1,), (), (2, 0), (-2, -2), (2.0,), ("2",), (True,), 4, "4", None, {2: 2}])
@pytest.mark.parametrize("make", [init_device_mesh, hyper_parallel.init_device_mesh])
def test_no_mesh_has_that_shape(make, shape):
    with pytest.raises(MeshError, match="'mesh_shape' must be") as e:
        make("cpu", shape)
    assert repr(shape) in e.value.attempt and e.value.rule and e.value.fix


def test_names_are_counted_first():
    with pytest.raises(MeshError, match="'mesh_dim_names' must be 2 different names"):
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp",))
