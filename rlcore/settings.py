"""Typed settings: flags win over environment, environment over TOML file, that over defaults."""

from __future__ import annotations

import ipaddress
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from rlcore.errors import UsageError
from rlcore.home import default_home
from rlcore.link_settings import KeepsTraces, LearnerEnd, ServerEnd, link_endpoint

CONFIG_FILE = "paceline.toml"
"""Read from the working folder when ``--config`` names no other."""

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Method = Literal["eagle3", "draft_model"]
Speculation = Literal["adaptive", "fixed", "off"]


class LearningOptions(BaseModel, extra="forbid"):
    """How the learner learns. ``serve`` passes these on to the learner that it starts."""

    seed: int = Field(0, description="Seed of every random choice of the learner")
    lr_matrix: float = Field(0.03, gt=0, description="Muon's learning rate, for hidden matrices")
    lr_other: float = Field(0.002, gt=0, description="AdamW's learning rate, for everything else")
    objective: str = Field("kl-push", description="Objective of draft learning, by name")
    unroll: int | None = Field(
        None,
        ge=1,
        le=16,
        description="Draft steps unrolled in training; default: all that are served",
    )
    batch_tokens: int = Field(256, ge=32, description="Output positions in one update")
    replay_gib: float = Field(
        1.0, gt=0, description="Budget of the replay in memory, GiB; on disk up to twice that"
    )
    replay_ratio: float = Field(
        8.0, gt=0, description="Trained positions per received position, at most"
    )
    heldout_share: float = Field(0.15, gt=0, lt=1, description="Share of prompts never trained on")
    publish_interval_s: float | None = Field(
        None,
        gt=0,
        description="Seconds between two judgements; default: from the measured gain and cost",
    )
    gate_tokens: int = Field(5000, ge=100, description="Held-out tokens a judgement needs")
    checkpoint_interval_s: float = Field(120.0, gt=0, description="Seconds between two checkpoints")
    threads: int = Field(1, ge=1, description="Threads of the learner")
    nice: int = Field(19, ge=0, le=19, description="Added to the learner's niceness")


class CommonSettings(BaseSettings):
    """What every command has."""

    model_config = SettingsConfigDict(
        env_prefix="PACELINE_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_implicit_flags=True,
    )

    home: Path = Field(
        default_factory=default_home, description="Folder of models, drafts and the learner's state"
    )
    log_json: bool = Field(False, description="Log JSON lines")
    log_level: LogLevel = Field("INFO", description="Least severe level that is logged")
    own_file: ClassVar[bool] = False
    """Whether its file is read by no other command, so that it holds no keys of theirs."""
    file_of: ClassVar[type[CommonSettings] | None] = None
    """The command that a file of its own is written for: what only that one uses is passed over."""
    _config_file: Path | None = PrivateAttr(None)

    @property
    def config_file(self) -> Path | None:
        """The TOML file that was read, with its whole path."""
        return self._config_file

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        return home.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _FileSource(settings_cls, _config_file))


class ServeSettings(CommonSettings, ServerEnd, KeepsTraces):
    """Serve a model with speculative decoding and a drafter that learns from the traffic.

    Every flag can also stand in a TOML file (--config FILE; paceline.toml in the working folder is
    read by itself) or in the environment (PACELINE_PORT, PACELINE_LEARNING__SEED). Everything after
    a lone -- is passed to vLLM, for example: -- --tensor-parallel-size 2
    """

    target: str = Field("embedded", description="Model: 'embedded', a folder, or a Hugging Face id")
    served_model_name: str | None = Field(
        None, description="Name in the API; default: the folder's"
    )
    draft: str = Field(
        "auto",
        description="Drafter to start from: 'auto' (the shipped one for the embedded model, else "
        "untrained), 'none' (untrained), a folder, or an id",
    )
    draft_method: Method = Field("eagle3", description="Type of the drafter")
    speculative_tokens: int = Field(3, ge=1, le=16, description="K, the tokens drafted in a step")
    draft_vocab: int = Field(
        4096,
        ge=256,
        description="Tokens that a new EAGLE-3 head can draft, or a draft model is trained on",
    )
    speculation: Speculation = Field(
        "adaptive",
        description="'adaptive' drafts 0 to K tokens in a step, whatever is fastest; 'fixed' always K; "
        "'off' none",
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on; others than loopback need a key"
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    api_key: SecretStr | None = Field(
        None,
        description="Key that every route asks for; may name any tenant, and is the admin's unless there is "
        "an --admin-key",
    )
    admin_key: SecretStr | None = Field(
        None, description="Key that may change what is served, and purge any tenant's traces"
    )
    keys_file: Path | None = Field(
        None,
        description="Keys and rules of the tenants (paceline keys new); read again when it changes",
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Requests that the engine works on at once; default: vLLM's max_num_seqs",
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="Requests that may wait besides, before more are refused with 429; default: as many as "
        "may run",
    )
    max_body_mib: float = Field(8.0, gt=0, description="Largest body of a request, MiB")
    drain_s: float = Field(
        30.0, ge=0, description="Seconds that running requests are given to end at a shutdown"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type the model is served in"
    )
    max_model_len: int | None = Field(None, ge=16, description="Longest sequence, tokens")
    kv_cache_gib: float | None = Field(None, gt=0, description="KV cache on a CPU, GiB; default 2")
    cores: int | None = Field(
        None,
        ge=1,
        description="Cores that the model computes on, on a CPU; POST /v1/paceline/cores changes them. "
        "Default: all, and a local learner has a part in them; given, a learner has what is left",
    )
    enforce_eager: bool = Field(
        True, description="No compilation on a CPU: starts a minute sooner, is a sixth slower"
    )
    policy_lora_rank: int = Field(
        0,
        ge=0,
        description="Take LoRA adapters up to this rank, and not whole checkpoints, as new versions of the "
        "target (rl-train with [lora])",
    )
    learner: str = Field(
        "local", description="'local' starts one, 'off' none, or the address of a running one"
    )
    capture: bool = Field(True, description="Send traces to the learner")
    capture_rate: float = Field(1.0, ge=0, le=1, description="Share of requests that are captured")
    capture_span_tokens: int = Field(
        2048, ge=32, le=32768, description="Longest span of a trace, tokens"
    )
    capture_queue: int = Field(256, ge=1, description="Spans held before the oldest is dropped")
    parent_pid: int | None = Field(
        None, ge=1, description="Process that started it; the server ends when that one is gone"
    )
    learning: LearningOptions = Field(default_factory=LearningOptions)
    engine_args: Annotated[list[str], NoDecode] = Field(
        default_factory=list, description="vLLM's own arguments (also: everything after --)"
    )

    @field_validator("api_key", "admin_key")
    @classmethod
    def _real_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and not key.get_secret_value().strip():
            raise ValueError("an empty key guards nothing; give one, or leave the option out")
        return key

    @field_validator("engine_args", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("engine_args")
    @classmethod
    def _none_of_ours(cls, words: list[str]) -> list[str]:
        for word in words:
            flag = word.split("=")[0].replace("_", "-")
            if flag in OURS:
                raise ValueError(f"vLLM's own {flag} is not used; {OURS[flag]}")
        return words

    @field_validator("learner")
    @classmethod
    def _known_learner(cls, learner: str, info: ValidationInfo) -> str:
        return learner if learner in ("local", "off") else link_endpoint(learner, info.data)

    @model_validator(mode="after")
    def _key_for_the_network(self) -> ServeSettings:
        keys = (self.api_key, self.admin_key, self.keys_file)
        if all(key is None for key in keys) and not _is_loopback(self.host):
            raise ValueError(
                f"listening on {self.host} needs --api-key or --keys-file; without one only loopback is "
                "served"
            )
        if self.curve_secret_file is not None and self.learner in ("local", "off"):
            raise ValueError(
                "CURVE keys are for a learner of its own: give its address with --learner"
            )
        return self


class DrafterSettings(LearningOptions):
    """What is learned, and how."""

    target: str = Field("embedded", description="The model served: 'embedded', a folder, or an id")
    method: Method = Field("eagle3", description="Type of the drafter")
    speculative_tokens: int = Field(3, ge=1, le=16, description="K, the tokens drafted in a step")


class LearnSettings(CommonSettings, LearnerEnd, KeepsTraces, DrafterSettings):
    """Learn a drafter from the traces of a server, in a process of its own.

    With --replay it learns from recordings instead; see paceline learn --replay --help.
    """

    bind: str = Field(
        "ipc",
        description="Where servers find it: 'ipc' (in the home folder), ipc:///path, or "
        "tcp://127.0.0.1:PORT (traces there, control on PORT + 1)",
    )
    parent_pid: int | None = Field(
        None, ge=1, description="Process that started it; the learner ends when that one is gone"
    )

    @field_validator("bind")
    @classmethod
    def _known_bind(cls, bind: str, info: ValidationInfo) -> str:
        return bind if bind == "ipc" else link_endpoint(bind, info.data)


class ReplaySettings(CommonSettings, DrafterSettings):
    """Learn a drafter from recordings, as live but with no server, and the same every time.

    Recordings are made with 'paceline record'. The best version is written to --out, a drafter
    folder that 'paceline serve --draft' takes.
    """

    replay: list[Path] = Field(
        min_length=1, description="A recording; repeat the flag for more, in their order"
    )
    out: Path = Field(description="Folder that is made for the drafter; must not exist")
    draft: str = Field(
        "none", description="Drafter to start from: 'none' (untrained), 'auto', a folder, or an id"
    )
    draft_vocab: int = Field(4096, ge=256, description="Tokens that a new EAGLE-3 head can draft")
    play_ratio: float = Field(
        1.0,
        gt=0,
        description="Trained positions per received position while the recordings are played; "
        "--replay-ratio says how many there are in the end",
    )
    cut_ok: bool = Field(False, description="Take a recording that was cut off, as far as it goes")


class RecordSettings(CommonSettings, LearnerEnd, KeepsTraces):
    """Keep the trace stream of a server in a file, to learn from it again.

    Start the server with --learner and the address that is printed.
    """

    out: Path = Field(description="The file; must not exist")
    bind: str = Field(
        "ipc",
        description="Where the server finds it: 'ipc' (in the home folder), ipc:///path, or "
        "tcp://127.0.0.1:PORT",
    )
    target: str = Field("embedded", description="The model served: 'embedded', a folder, or an id")
    method: Method = Field("eagle3", description="Type of the drafter")
    max_gib: float = Field(64.0, gt=0, description="The file ends at this size, GiB")

    @field_validator("bind")
    @classmethod
    def _known_bind(cls, bind: str, info: ValidationInfo) -> str:
        return bind if bind == "ipc" else link_endpoint(bind, info.data)


class _FileSource(TomlConfigSettingsSource):
    """The TOML file, which all commands but those with ``own_file`` share: each reads its own keys.

    A key that some other command knows is passed over, one that none knows stays and is refused.
    The embedded learner is given the server's file.
    """

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if issubclass(self.settings_cls, CommonSettings) and self.settings_cls.own_file:
            written_for = self.settings_cls.file_of
            return values if written_for is None else _of(self.settings_cls, values, written_for)
        if issubclass(self.settings_cls, LearningOptions):
            values = {**values.get("learning", {}), **values}
        own = self.settings_cls.model_fields
        commands = (ServeSettings, LearnSettings, ReplaySettings, RecordSettings)
        others = {name for command in commands for name in command.model_fields} - set(own)
        if self.settings_cls is ServeSettings:
            others -= set(LearningOptions.model_fields)  # they belong into [learning]: say so
        return {key: value for key, value in values.items() if key not in others}


def _of(used: type[BaseModel], values: dict[str, Any], known: type[BaseModel]) -> dict[str, Any]:
    """``values`` without the keys, in sections too, that ``known`` has and ``used`` has not."""
    kept = {}
    for key, value in values.items():
        if key not in used.model_fields:
            if key not in known.model_fields:
                kept[key] = value  # nobody knows it: to be refused
            continue
        own = used.model_fields[key].annotation
        if isinstance(value, dict) and isinstance(own, type) and issubclass(own, BaseModel):
            other = known.model_fields[key].annotation
            assert isinstance(other, type)
            assert issubclass(other, BaseModel)
            value = _of(own, value, other)
        kept[key] = value
    return kept


_BEFORE = "give it before the --"
OURS = {
    "--model": "give --target before the --",
    "--speculative-config": "give --draft and --speculative-tokens before the --",
    "--worker-cls": "Paceline's worker is needed",
    "--async-scheduling": "Paceline needs synchronous scheduling",
} | dict.fromkeys(("--api-key", "--host", "--port", "--dtype", "--served-model-name"), _BEFORE)
"""vLLM flags that are set from our own settings -> what to do instead."""

Settings = TypeVar("Settings", bound=CommonSettings)

_config_file: Path | None = None


def load(cls: type[Settings], argv: list[str], program: str = "paceline") -> Settings:
    """Settings from flags, environment and file; raises UsageError with a line for each problem."""
    global _config_file
    argv, engine_args = _split_engine_args(argv)
    argv, path = _take_config(argv)
    _config_file = path
    given: dict[str, Any] = {"engine_args": engine_args} if engine_args else {}
    try:
        cli: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=argv, cli_prog_name=program, cli_exit_on_error=False
        )
        settings = cls(_cli_settings_source=cli, **given)
    except ValidationError as error:
        raise UsageError("; ".join(_line(problem) for problem in error.errors())) from None
    except SettingsError as error:
        raise UsageError(str(error).removeprefix("error parsing CLI: ")) from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    finally:
        _config_file = None  # settings that are made without flags read no file
    settings._config_file = None if path is None else path.absolute()
    return settings


def _split_engine_args(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _take_config(argv: list[str]) -> tuple[list[str], Path | None]:
    """``--config FILE`` out of the flags; it is read before they are."""
    rest, path = [], os.environ.get("PACELINE_CONFIG")
    words = iter(argv)
    for word in words:
        if word == "--config":
            path = next(words, "")
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
        else:
            rest.append(word)
    if path is None:
        default = Path(CONFIG_FILE)
        return rest, default if default.is_file() else None
    if not Path(path).is_file():
        raise UsageError(f"there is no configuration file {path!r}")
    return rest, Path(path)


def _line(problem: Any) -> str:
    place = ".".join(str(part).replace("_", "-") for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"--{place}: {message}" if place else message


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
