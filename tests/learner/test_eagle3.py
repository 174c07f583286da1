import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

import learner.drafters.attention as attention
from learner.batch import collate
from learner.drafters.eagle3 import Eagle3
from learner.estimate import replay_drafts
from learner.target import Target, choose_vocab, prior_counts
from tests.learner.tiny import HIDDEN, VOCAB, make_span, make_steps, make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    return model, Target.open(folder)


def shaken(target, seed=3):
    """A head whose every weight matters."""
    head = Eagle3.build(target, vocab_size=40)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head


class Naive:
    """The head, one position at a time with a list of keys and values, written from vLLM's code."""

    def __init__(self, head, theta):
        self.w = {k: v.detach().double() for k, v in head.state_dict().items()}
        self.embedding = head.embedding.double()
        self.vocab = head.vocab
        self.eps = 1e-6
        self.theta = theta
        self.heads, self.kv, self.dim = 4, 2, 8

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean() + self.eps) * self.w[name]

    def rope(self, x, position):
        half = self.dim // 2
        angle = position * self.theta ** (-torch.arange(half).double() * 2 / self.dim)
        a, b = x[:, :half], x[:, half:]
        return torch.cat(
            [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1
        )

    def step(self, token, hidden, position, cache):
        """Appends to ``cache``; returns (normed output, output to feed back)."""
        layer = "midlayer."
        attn = layer + "self_attn."
        x = torch.cat([
            self.norm(self.embedding[token], layer + "input_layernorm.weight"),
            self.norm(hidden, layer + "hidden_norm.weight"),
        ])  # fmt: skip
        q = self.rope((self.w[attn + "q_proj.weight"] @ x).view(self.heads, self.dim), position)
        k = self.rope((self.w[attn + "k_proj.weight"] @ x).view(self.kv, self.dim), position)
        v = (self.w[attn + "v_proj.weight"] @ x).view(self.kv, self.dim)
        cache.append((k, v))
        out = []
        for h in range(self.heads):
            g = h // (self.heads // self.kv)
            scores = torch.stack([q[h] @ key[g] for key, _ in cache]) / self.dim**0.5
            out.append(
                sum(p * val[g] for p, (_, val) in zip(scores.softmax(0), cache, strict=True))
            )
        residual = hidden + self.w[attn + "o_proj.weight"] @ torch.cat(out)
        y = self.norm(residual, layer + "post_attention_layernorm.weight")
        gate = silu(self.w[layer + "mlp.gate_proj.weight"] @ y)
        up = self.w[layer + "mlp.up_proj.weight"] @ y
        residual = residual + self.w[layer + "mlp.down_proj.weight"] @ (gate * up)
        return self.norm(residual, "norm.weight"), residual

    def draft(self, span, anchor, steps, own_tokens):
        """Hidden states before the head of each draft step from ``anchor``."""
        cache, ids = [], span.token_ids.tolist()
        features = span.aux.double() @ self.w["fc.weight"].T
        for t in range(anchor + 1):
            normed, feedback = self.step(ids[t + 1], features[t], span.first_position + t, cache)
        outputs = [normed]
        for j in range(1, steps):
            if not own_tokens and anchor + 1 + j >= len(ids):
                break
            if own_tokens:
                token = self.vocab[(self.w["lm_head.weight"] @ outputs[-1]).argmax()]
            else:
                token = ids[anchor + 1 + j]
            position = span.first_position + anchor + j
            normed, feedback = self.step(token, feedback, position, cache)
            outputs.append(normed)
        return outputs


@pytest.mark.parametrize("own_tokens", [False, True])
@pytest.mark.parametrize("block", [512, 3])
def test_unroll_equals_drafting_one_position_at_a_time(world, own_tokens, block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model, target = world
    head = shaken(target)
    naive = Naive(head, theta=5000.0)
    spans = [make_span(model, 12, 5), make_span(model, 9, 12, first_position=7, seed=1)]
    batch = collate(spans, with_aux=True)
    outputs = head.unroll(batch, 3, own_tokens=own_tokens)
    for i, (b, row) in enumerate(
        zip(batch.anchor_span.tolist(), batch.anchor_row.tolist(), strict=True)
    ):
        expected = naive.draft(spans[b], row, 3, own_tokens)
        for j in range(3):
            if own_tokens or row + 1 + j < spans[b].rows:
                torch.testing.assert_close(
                    outputs[j][i].double(), expected[j], rtol=2e-4, atol=2e-4
                )


def test_blockwise_attention_has_the_same_gradient(world, monkeypatch):
    model, target = world
    batch = collate([make_span(model, 14, 3)], with_aux=True)
    grads = []
    for block in (512, 4):
        monkeypatch.setattr(attention, "QUERY_BLOCK", block)
        head = shaken(target)
        torch.stack(head.unroll(batch, 3)).square().sum().backward()
        grads.append(head.midlayer.self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_replay_gives_what_stepping_would_draft_at_every_verification(world):
    model, target = world
    head = shaken(target)
    naive = Naive(head, theta=5000.0)
    span = make_span(model, 10, 12, first_position=7)
    span = type(span)(**{**vars(span), "steps": make_steps(span, 3)})
    drafts = replay_drafts(head, span)
    assert len(drafts) == len(span.steps) > 2
    for step, draft in zip(span.steps, drafts, strict=True):
        outputs = naive.draft(span, step.position - 2 - span.first_position, 3, own_tokens=True)
        expected = [int(head.vocab[(naive.w["lm_head.weight"] @ h).argmax()]) for h in outputs]
        assert draft == expected


def test_states_behind_an_anchor_do_not_change_its_drafts(world):
    model, target = world
    head = shaken(target)
    span = make_span(model, 12, 3)
    changed = span.aux.clone()
    changed[8:] += 1.0
    other = type(span)(**{**vars(span), "aux": changed})
    one = head.unroll(collate([span], with_aux=True), 3)
    two = head.unroll(collate([other], with_aux=True), 3)
    kept = 8 - span.first_anchor
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a[:kept], b[:kept])
        assert not torch.equal(a[kept:], b[kept:])


def test_an_exported_head_loads_back_and_leaves_the_embedding_out(world, tmp_path):
    model, target = world
    head = shaken(target)
    head.save(tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert not any("embed" in name for name in tensors)
    vocab = torch.arange(40) + tensors["d2t"]
    assert torch.equal(vocab, head.vocab)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), vocab)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].shape == (VOCAB,)
    again = Eagle3.load(tmp_path / "head", target)
    batch = collate([make_span(model, 8, 2)], with_aux=True)
    for a, b in zip(head.unroll(batch, 3), again.unroll(batch, 3), strict=True):
        assert torch.equal(a, b)
    assert again.export()[1] == head.export()[1]


def test_a_head_over_the_whole_vocabulary_needs_no_map(world, tmp_path):
    _, target = world
    head = Eagle3.build(target, vocab_size=VOCAB)
    tensors, config = head.export()
    assert "d2t" not in tensors
    del config["draft_vocab_size"], config["eagle_config"], tensors["lm_head.weight"]
    save_file(tensors | {"embed_tokens.weight": target.embedding}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = Eagle3.load(tmp_path, target)
    assert len(again.vocab) == VOCAB
    assert torch.equal(again.lm_head.weight, target.lm_head)


def test_a_speculators_head_is_read_with_its_own_residual(world, tmp_path):
    model, target = world
    head = shaken(target)
    tensors, config = head.export()
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    outer = {"transformer_layer_config": config, "norm_before_residual": True,
             "draft_vocab_size": 40}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(outer))
    again = Eagle3.load(tmp_path, target)
    assert again.norm_before_residual
    assert again.export()[1]["norm_before_residual"]
    batch = collate([make_span(model, 8, 2)], with_aux=True)
    assert not torch.allclose(head.unroll(batch, 1)[0], again.unroll(batch, 1)[0])


def test_a_head_with_another_embedding_is_refused(world, tmp_path):
    _, target = world
    tensors, config = Eagle3.build(target, vocab_size=40).export()
    save_file(
        tensors | {"embed_tokens.weight": target.embedding + 1}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="embedding"):
        Eagle3.load(tmp_path, target)


def test_the_vocabulary_holds_special_tokens_and_the_most_counted(world):
    _, target = world
    assert target.special_ids == [90, 91]
    assert choose_vocab(prior_counts(target), 5).tolist() == [0, 1, 2, 90, 91]
    counts = torch.zeros(VOCAB)
    counts[[7, 50]] = 3
    assert choose_vocab(prior_counts(target) + counts, 5).tolist() == [0, 7, 50, 90, 91]
    assert target.hidden_size == HIDDEN
    assert target.aux_layers == (2, 4, 5)


def test_a_target_too_shallow_for_three_depths_is_refused(world):
    _, target = world
    shallow = replace(target, config={**target.config, "num_hidden_layers": 6})
    with pytest.raises(ValueError, match="too shallow"):
        Eagle3.build(shallow)


@pytest.mark.parametrize(
    ("layers", "extra", "message"),
    [
        ([2, 4, 5, 6], {}, "read 4 auxiliary layers, its fc is made for 3"),
        ([2, 4], {}, "read 2 auxiliary layers, its fc is made for 3"),
        ([2, 4, 9], {}, r"layers \[2, 4, 9\] of a target that has 8"),
        ([2, 4, 4], {}, r"layers \[2, 4, 4\]"),
        ([2, 4, 5], {"use_aux_hidden_state": False}, "without auxiliary states"),
    ],
)
def test_a_head_whose_auxiliary_states_cannot_be_given_is_refused_in_one_line(
    world, tmp_path, layers, extra, message
):
    _, target = world
    Eagle3.build(target, vocab_size=40).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers} | extra
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as refused:
        Eagle3.load(tmp_path, target)
    assert "\n" not in str(refused.value)


def test_a_config_that_names_no_layers_means_vllms_three(world, tmp_path):
    _, target = world
    Eagle3.build(target, vocab_size=40).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Eagle3.load(tmp_path, target).aux_count == 3
