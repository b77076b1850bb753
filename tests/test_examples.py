# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring of the package runs and prints what it says."""
import doctest
import importlib
import inspect
import pkgutil

import pytest

import ms_dtensor

SKIP = {"ms_dtensor.__main__"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(ms_dtensor.__path__, "ms_dtensor.") if m.name not in SKIP)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, cpu):
    result = doctest.testmod(importlib.import_module(name),
                             optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


PUBLIC = ("ms_dtensor", "ms_dtensor.parallel", "ms_dtensor.optim", "ms_dtensor.pipeline", "ms_dtensor.checkpoint",
          "ms_dtensor.debug", "ms_dtensor.verify")
ALSO = {"ms_dtensor.comm": "get_backend set_cpu_backend register_backend fake_world",
        "ms_dtensor.compat.hyper_parallel": "DistributedOp",
        "ms_dtensor.init": "uniform_ normal_ trunc_normal_ constant_ zeros_ ones_ fans calculate_gain xavier_uniform_ "
                           "xavier_normal_ kaiming_uniform_ kaiming_normal_"}


@pytest.mark.parametrize("module", (*PUBLIC, *ALSO))
def test_every_public_name_has_an_example(module):
    found = importlib.import_module(module)
    names = ALSO[module].split() if module in ALSO else found.__all__
    missing = [n for n in names if n != "__version__" and ">>>" not in (inspect.getdoc(getattr(found, n)) or "")]
    assert not missing, missing
