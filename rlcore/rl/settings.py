"""Settings of ``rl-train`` and ``rl-eval``: one TOML file and flags over it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from rlcore.algorithms.recipes import Recipe, RecipeError, recipe_named
from rlcore.asynchrony.temperature import LEAST, MOST
from rlcore.policy.lora import Lora
from rlcore.settings import CommonSettings, Method, Speculation

RECIPE_FIELDS = frozenset(f.name for f in dataclasses.fields(Recipe)) - {"name", "source"}


class EnvironmentOptions(BaseModel, extra="forbid"):
    """What is practised."""

    name: str = Field(
        "reasoning_gym:chain_sum", description="Environment: see docs/environments.md"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The environment's own options"
    )
    workers: int = Field(1, ge=1, le=256, description="Processes that environments run in")
    deadline_s: float = Field(30.0, gt=0, description="Seconds for one reset, step or score")
    max_turns: int = Field(1, ge=1, le=1000, description="Replies of the policy in an episode")


class EpisodeLimits(BaseModel, extra="forbid"):
    """How long an episode may be."""

    max_prompt_tokens: int = Field(512, ge=1, description="A longer prompt fails the task")
    max_tokens: int = Field(
        256, ge=1, description="Tokens that the policy may sample in an episode"
    )


class SamplingOptions(EpisodeLimits):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0, le=4, description="Sampling temperature")
    adapt_temperature: bool = Field(
        False, description="Move the temperature with entropy and the share of equal groups"
    )

    @model_validator(mode="after")
    def _adaptable(self) -> SamplingOptions:
        if self.adapt_temperature and not LEAST <= self.temperature <= MOST:
            raise ValueError(f"temperature is adapted from {LEAST} to {MOST}; begin there")
        return self


class OptimiserOptions(BaseModel, extra="forbid"):
    """How the policy is moved."""

    lr: float = Field(1e-6, gt=0, description="AdamW's learning rate")
    warmup: int = Field(0, ge=0, description="Updates of linear warm-up")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Norm that the gradient is clipped to")
    micro_batch_tokens: int = Field(4096, ge=16, description="Tokens computed at a time")
    updates_per_batch: int = Field(1, ge=1, le=16, description="Optimizer updates on one batch")
    threads: int | None = Field(
        None, ge=1, description="Threads on a CPU, at the start; default: half the cores"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the layers' products; weights and logits are float32"
    )
    device: str = Field("auto", description="'auto', 'cpu', or a CUDA device")


class LoraOptions(BaseModel, extra="forbid"):
    """Train an adapter of the policy in place of all its weights."""

    rank: int = Field(0, ge=0, le=512, description="Of the adapter; 0 trains the whole policy")
    alpha: float = Field(
        32.0, gt=0, description="What the adapter adds is scaled by alpha over rank"
    )
    targets: list[str] = Field(
        default_factory=list,
        description="Linear layers that are adapted, as in q_proj; default: all of the decoder",
    )

    def chosen(self) -> Lora | None:
        return Lora(self.rank, self.alpha, self.targets) if self.rank else None


class EngineOptions(BaseModel, extra="forbid"):
    """The engine that samples: a server that is started, a running one, or one in the process."""

    where: Literal["server", "process"] = Field(
        "server",
        description="Start a server, or have the engine in the process, with a drafter that is frozen",
    )
    url: str | None = Field(None, description="A running Paceline server; default: one is started")
    api_key: SecretStr | None = Field(None, description="Its key")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "float32", description="Type the policy is served in; bfloat16 swallows small updates"
    )
    draft: str = Field("auto", description="Drafter to start from, as in paceline serve")
    draft_method: Method = Field("eagle3", description="Type of the drafter")
    speculative_tokens: int = Field(3, ge=1, le=16, description="K, the tokens drafted in a step")
    speculation: Speculation = Field("adaptive", description="As in paceline serve")
    threads: int | None = Field(
        None, ge=1, description="Threads on a CPU, at the start; default: half the cores"
    )
    max_model_len: int | None = Field(None, ge=16, description="Longest sequence, tokens")
    request_deadline_s: float = Field(
        1800.0, gt=0, description="Seconds for one completion, its time in the queue included"
    )
    serve_flags: list[str] = Field(
        default_factory=list, description="More flags of paceline serve, as words"
    )
    engine_args: list[str] = Field(default_factory=list, description="vLLM's own arguments")

    @field_validator("serve_flags")
    @classmethod
    def _cores_are_known(cls, words: list[str]) -> list[str]:
        if any(word.split("=")[0] == "--cores" for word in words):
            raise ValueError("the engine's cores are shared out here: give engine.threads")
        return words

    @model_validator(mode="after")
    def _one_place(self) -> EngineOptions:
        if self.where == "process" and self.url is not None:
            raise ValueError("a url is of a server; leave it out, or give where = 'server'")
        return self

    @property
    def learns_drafts(self) -> bool:
        """Whether a server that is started learns drafts."""
        return False


class TrainingEngineOptions(EngineOptions):
    """With what only training needs."""

    learn_drafts: bool = Field(
        True, description="The drafter learns on as the policy moves; not with where = 'process'"
    )

    @model_validator(mode="after")
    def _learns_in_a_server(self) -> TrainingEngineOptions:
        given = self.learn_drafts and "learn_drafts" in self.model_fields_set
        if self.where == "process" and given:
            raise ValueError(
                "drafts are learned by a server; leave learn-drafts out, or give where = 'server'"
            )
        return self

    @property
    def learns_drafts(self) -> bool:
        return self.learn_drafts and self.where == "server"


class RunSettings(CommonSettings):
    """What training and evaluation have in common."""

    own_file: ClassVar[bool] = True

    model: str = Field(
        "embedded", description="Policy to start from: 'embedded', a folder, or an id"
    )
    concurrency: int = Field(32, ge=1, description="Rollouts that run at a time, at most")
    evaluate_tasks: int = Field(128, ge=1, description="Held-out tasks in an evaluation")
    evaluate_samples: int = Field(1, ge=1, description="Samples a task; 1 is greedy")
    evaluate_temperature: float = Field(0.0, ge=0, description="0 is greedy")
    environment: EnvironmentOptions = Field(default_factory=EnvironmentOptions)
    sampling: EpisodeLimits = Field(default_factory=EpisodeLimits)
    engine: EngineOptions = Field(default_factory=EngineOptions)

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> RunSettings:
        if self.evaluate_temperature == 0 and self.evaluate_samples > 1:
            raise ValueError("several greedy samples are all the same; give evaluate-temperature")
        longest = self.engine.max_model_len
        needed = self.sampling.max_prompt_tokens + self.sampling.max_tokens
        if longest is not None and needed > longest:
            raise ValueError(
                f"sampling.max-prompt-tokens and sampling.max-tokens are {needed} together, more than "
                f"engine.max-model-len {longest}"
            )
        return self


class RLTrainSettings(RunSettings):
    """Train a policy with reinforcement learning on the engine that serves it.

    usage: rl-train PRESET|FILE.toml [flags]. Every flag can also stand in the file, those with a dot
    in a section of it.
    """

    out: Path = Field(description="Folder of the run: checkpoints, logs, and in the end the policy")
    algorithm: str = Field("dapo", description="Recipe, see docs/rl-train.md")
    recipe: dict[str, Any] = Field(
        default_factory=dict, description="Parts of the recipe that are to be others"
    )
    updates: int = Field(100, ge=1, description="Optimizer updates of the run")
    groups_per_update: int = Field(16, ge=1, description="Groups (prompts) in an update")
    group_size: int = Field(8, ge=2, description="Rollouts of one prompt")
    max_off_policy_steps: int = Field(
        1,
        ge=0,
        description="Optimizer updates that a rollout's oldest token may be behind when it is trained on",
    )
    weigh_tasks: bool = Field(
        False, description="Practise tasks less whose recent groups had equal rewards"
    )
    balance: bool = Field(
        True, description="Adapt concurrency, micro-batch and the split of a CPU's cores"
    )
    seed: int = Field(0, description="Of the order of tasks")
    minutes: float | None = Field(None, gt=0, description="End after so long, as if complete")
    evaluate_every: int = Field(10, ge=0, description="Updates between evaluations; 0: none")
    checkpoint_every: int = Field(10, ge=1, description="Updates between two checkpoints")
    resume: bool = Field(False, description="Go on from the last checkpoint in --out")
    dry_run: bool = Field(False, description="Check everything that can be, and start nothing")
    sampling: SamplingOptions = Field(default_factory=SamplingOptions)
    optimiser: OptimiserOptions = Field(default_factory=OptimiserOptions)
    lora: LoraOptions = Field(default_factory=LoraOptions)
    engine: TrainingEngineOptions = Field(default_factory=TrainingEngineOptions)

    @field_validator("out")
    @classmethod
    def _whole_path(cls, out: Path) -> Path:
        return out.expanduser().absolute()

    @model_validator(mode="after")
    def _fits_together(self) -> RLTrainSettings:
        try:
            self.chosen_recipe()
        except RecipeError as error:
            raise ValueError(str(error)) from None
        least = self.optimiser.updates_per_batch - 1
        if self.max_off_policy_steps < least:
            raise ValueError(
                f"the last of optimiser.updates-per-batch {least + 1} is {least} updates behind a fresh "
                f"rollout; max-off-policy-steps {self.max_off_policy_steps} is less"
            )
        if self.concurrency < self.group_size:
            raise ValueError(
                f"concurrency {self.concurrency} is less than group-size {self.group_size}; a group is "
                "started as a whole"
            )
        return self

    def chosen_recipe(self) -> Recipe:
        """The named recipe with the parts that were changed; raises RecipeError."""
        recipe = recipe_named(self.algorithm)
        if unknown := set(self.recipe) - RECIPE_FIELDS:
            raise RecipeError(
                f"a recipe has no {', '.join(sorted(unknown))}; its parts are "
                f"{', '.join(sorted(RECIPE_FIELDS))}"
            )
        return dataclasses.replace(recipe, **self.recipe) if self.recipe else recipe


class RLEvalSettings(RunSettings):
    """Measure a policy on the held-out tasks of a run's file.

    usage: rl-eval FOLDER|URL PRESET|FILE.toml [flags]. With a URL --model names the tokenizer's folder.
    The folder may hold a LoRA adapter.
    """

    file_of: ClassVar[type[CommonSettings] | None] = RLTrainSettings

    json_file: Path | None = Field(None, description="Write the result here as JSON")
