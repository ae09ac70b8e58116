"""From trajectories to tensors, and who computes which row when."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.rollout.trajectory import Trajectory, VersionSpan
from rlbridge.trainer.batch import collate, collate_trajectories, plan_rows
from rlbridge.transport.errors import TrainingError


def trajectory(request_id, group, sample, prompt, response, **changes):
    made = Trajectory(
        request_id=request_id,
        group=group,
        sample=sample,
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.5] * len(response),
        versions=[VersionSpan(0, len(response), 0)],
        finish_reason="stop",
        replica=0,
    )
    return msgspec.structs.replace(made, **changes)


def test_rows_are_padded_on_the_right_and_positions_point_at_what_predicts():
    batch = collate([[5, 6], [7]], [[8, 9], [4, 3, 2]])
    assert batch.input_ids.tolist() == [[5, 6, 8, 9], [7, 4, 3, 2]]
    assert batch.response_ids.tolist() == [[8, 9, 0], [4, 3, 2]]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.positions.tolist() == [[1, 2, 3, 3], [0, 1, 2, 3]]


def test_the_end_of_sequence_token_keeps_its_loss_although_it_is_also_the_pad_token():
    eos = 0
    batch = collate([[5]] * 2, [[8, eos], [8, 9, 9, eos]])
    assert batch.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.tokens == 6


def test_rows_are_ordered_by_group_and_sample_with_all_that_belongs_to_them():
    batch = collate_trajectories(
        [
            trajectory(1, 4, 1, [2], [3, 1], finish_reason="length"),
            trajectory(2, 4, 0, [2], [5], logprobs=[-2.0]),
            trajectory(3, 2, 0, [6], [7], finish_reason="abort"),
        ],
        [1.0, 2.0, 3.0],
    )
    assert batch.rewards.tolist() == [3.0, 2.0, 1.0]
    assert batch.groups.tolist() == [2, 4, 4]
    assert batch.response_ids.tolist() == [[7, 0], [5, 0], [3, 1]]
    assert batch.behaviour_logprobs.tolist() == [[-0.5, 0.0], [-2.0, 0.0], [-0.5, -0.5]]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.interrupted.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "rewards", "message"),
    [
        ([], [], "no rows"),
        ([trajectory(1, 0, 0, [2], [3])], [], "1 trajectories came with 0 rewards"),
        ([trajectory(1, 0, 0, [], [3])], [0.0], "empty prompt"),
        ([trajectory(9, 0, 0, [2], [3], logprobs=[])], [0.0], "trajectory 9 has 1 tokens but 0 log"),
        ([trajectory(9, 0, 0, [2], [3], logprobs=[float("-inf")])], [0.0], "trajectory 9: .* not finite"),
        ([trajectory(9, 0, 0, [2], [3])], [float("nan")], "trajectory 9: its reward is nan"),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(rows, rewards, message):
    with pytest.raises(TrainingError, match=message):
        collate_trajectories(rows, rewards)


@given(
    rows=st.integers(1, 60),
    mini_batches=st.integers(1, 5),
    micro=st.none() | st.integers(1, 9),
    world=st.integers(1, 5),
)
def test_every_row_is_computed_once_and_ranks_agree_on_the_number_of_forwards(rows, mini_batches, micro, world):
    if rows < mini_batches:
        with pytest.raises(TrainingError, match=r"trainer\.mini_batches"):
            plan_rows(rows, mini_batches=mini_batches, micro_batch_rows=micro, rank=0, world=world)
        return
    plans = [
        plan_rows(rows, mini_batches=mini_batches, micro_batch_rows=micro, rank=rank, world=world)
        for rank in range(world)
    ]
    seen = []
    for update in range(mini_batches):
        own = [plan[update].micro_batches for plan in plans]
        assert len({len(micro_batches) for micro_batches in own}) == 1
        computed = [row for micro_batches in own for rows_ in micro_batches for row in rows_]
        assert sorted(computed) == plans[0][update].rows
        assert all(len(rows_) <= (micro or rows) for micro_batches in own for rows_ in micro_batches)
        seen += computed
    assert sorted(seen) == list(range(rows))
    sizes = [len(mini.rows) for mini in plans[0]]
    assert max(sizes) - min(sizes) <= 1


def test_a_filler_row_trains_nothing():
    filler = collate([[5], [6]], [[8], [9]]).filler()
    assert filler.rows == 1
    assert filler.tokens == 0
    assert torch.equal(filler.input_ids, torch.tensor([[5, 8]]))
