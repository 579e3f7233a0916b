"""How processes share out the kernels of a model."""

from __future__ import annotations

import pytest

from llm_worker_rbee.backends.cpu import precompile


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_work_orders_keep_kernels_with_common_parts_in_one_process(processes: int) -> None:
    kernels = precompile._kernels_for(["Q4_1", "Q6_K"], [3], ["float16"])
    orders = precompile._work_orders(kernels, processes)
    assert len(orders) == processes
    assert all(sorted(one.name for one in order) == sorted(one.name for one in kernels) for order in orders)
    own = len(kernels) // processes  # about: what others have left comes after that
    firsts = [{kernel.name.partition(".")[0] for kernel in order[: own // 2]} for order in orders]
    assert all(not one & other for i, one in enumerate(firsts) for other in firsts[:i])
    for order in orders:
        places = [i for i, kernel in enumerate(order) if kernel.name.startswith("sampling")]
        assert places == list(range(places[0], places[0] + 8))
