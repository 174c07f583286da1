"""Between two sets of weights, and back, with each row of the head at its own token."""

import pytest
import torch

from learner.blend import blended
from learner.drafters.eagle3 import Eagle3
from learner.target import Target
from tests.learner.tiny import make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_target(folder)
    return Target.open(folder)


def head(target, seed: int, vocab: torch.Tensor) -> Eagle3:
    made = Eagle3(Eagle3.build(target, vocab_size=len(vocab)).config, vocab, target.embedding)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_every_weight_lies_on_the_line_and_comes_back(target, share):
    vocab = torch.arange(40)
    mine, live = head(target, 1, vocab), head(target, 2, vocab)
    before = {name: p.detach().clone() for name, p in mine.named_parameters()}
    given = dict(live.named_parameters())
    with blended(mine, live, share):
        for name, p in mine.named_parameters():
            wanted = given[name] + share * (before[name] - given[name])
            torch.testing.assert_close(p, wanted)
    assert all(torch.equal(p, before[name]) for name, p in mine.named_parameters())


def test_rows_meet_by_token_and_a_new_token_keeps_its_own(target):
    mine, live = head(target, 1, torch.arange(2, 42)), head(target, 2, torch.arange(40))
    own, theirs = mine.lm_head.weight.detach().clone(), live.lm_head.weight.detach()
    with blended(mine, live, 0.5):
        torch.testing.assert_close(mine.lm_head.weight[:38], (own[:38] + theirs[2:]) / 2)
        torch.testing.assert_close(mine.lm_head.weight[38:], own[38:])


def test_the_weights_come_back_after_an_error(target):
    vocab = torch.arange(40)
    mine, live = head(target, 1, vocab), head(target, 2, vocab)
    before = mine.fc.weight.detach().clone()
    with pytest.raises(KeyError), blended(mine, live, 0.5):
        raise KeyError
    assert torch.equal(mine.fc.weight, before)
