# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's own `save_checkpoint` and `load_checkpoint`, every rank its pieces: from one mesh to another."""
import tempfile

import numpy as np

from ms_dtensor import comm
from tests.cases import case
from tests.third_party.cases_mindformers import STEPS, TOLERANCE, Job, one_device

GROUP = "mindformers"

HALF = STEPS // 2


def save(world, job: Job, **options) -> str:
    """As its CheckpointCallback saves: files of a folder that all ranks reach."""
    from mindformers.checkpoint import save_checkpoint
    from mindformers.checkpoint.checkpoint import CommonInfo
    from mindformers.checkpoint.sharded_tensor import get_all_sharded_tensor_on_rank0
    from mindformers.checkpoint.utils import gather_param_names_on_rank0
    folder = comm.group(tuple(range(world.size))).all_gather_object(tempfile.mkdtemp())[0]
    common = CommonInfo()
    common.global_step = HALF
    save_checkpoint(HALF, job.net, job.optimizer, common_info=common, user_prefix="tiny", save_checkpoint_path=folder,
                    sharded_tensor_metas=get_all_sharded_tensor_on_rank0(network=[job.net, job.optimizer]),
                    global_model_keys=gather_param_names_on_rank0(set(job.net.parameters_dict())), **options)
    return folder


def goes_on(world, saved: tuple[int, int], *loaded: tuple[int, int], **options) -> None:
    """Half of the steps upon one mesh, the others upon each of the other ones; all as on one device."""
    losses, wanted = one_device()
    from mindformers.checkpoint.checkpoint import load_checkpoint
    job = Job(world, *saved)
    first = [job.step(step) for step in range(HALF)]
    folder = save(world, job, **options)
    for mesh in loaded:
        what, other = f"dp, tp = {saved}, then {mesh}, {options}", Job(world, *mesh)
        other.step(0)  # other weights and moments than those of the files, on all ranks
        load_checkpoint(folder, other.net, other.optimizer)
        assert int(other.optimizer.global_step.asnumpy()) == HALF, what
        for p, q in zip(job.moments(), other.moments(), strict=True):
            assert np.array_equal(p.full_tensor().asnumpy(), q.full_tensor().asnumpy()), (what, p.name)
        got = first + [other.step(step) for step in range(HALF, STEPS)]
        assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (what, got, losses)
        other.is_one_device(wanted, what)


@case(2, timeout=400)
def its_own_files_go_from_data_to_tensor_parallelism_and_back(world):
    goes_on(world, (2, 1), (1, 2))
    goes_on(world, (1, 2), (2, 1), remove_redundancy=True)


@case(4, timeout=400)
def its_run_goes_on_from_its_own_checkpoint_on_another_mesh(world):
    goes_on(world, (2, 2), (4, 1), (2, 2))
