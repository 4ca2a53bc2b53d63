"""Pre-flight checks of quantised models and versions: whether they can be read, made, and loaded by engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.finding import Finding
from asyncrl.config.settings import Config, CreateModelSettings
from asyncrl.data.model_dir import ModelError
from asyncrl.data.quantisation import GROUP, quantised_as, read_quantisation


def check_quantised(config: Config, base: Path) -> Iterator[Finding]:
    """Return whether the models are of a known form, and engines can take versions in the form of `weights.format`."""
    further = {
        "learner.teacher.model": config.learner.teacher.model,
        "learner.critic.model": config.learner.critic.model,
    }
    for key, path in further.items():
        try:
            if path and _there(base / path):
                read_quantisation(base / path)
        except ModelError as error:
            yield Finding((key,), str(error))
    form: str = config.weights.format
    try:
        if config.model.path and _there(base / config.model.path):
            published = quantised_as(base / config.model.path, form)
            form = published.form if published is not None else "plain"
    except ModelError as error:
        yield Finding(("model.path", "weights.format"), str(error))
        return
    if not config.trains or form in ("plain", "model"):
        return
    keys, plain = ("weights.format", "model.path"), 'set weights.format = "plain"'
    if config.weights.transport != "never":
        message = f'versions in the form {form} go only through the store; set weights.transport = "never", or {plain}'
        yield Finding((*keys, "weights.transport"), message)
    if form == "int4-groups" and not config.model.path and (columns := _uneven(config.model.create)):
        message = f"a matrix of the made model has {columns} columns, which are no groups of {GROUP}"
        yield Finding(("weights.format", "model.create"), f"{message}; change its sizes, or {plain}")
    for table, group in config.engine.tables.items():
        if group.staged == "always":
            message = f'servers take versions in the form {form} only from files; set "never", or {plain}'
            yield Finding((*keys, f"{table}.staged"), message)
        if problem := group.of_kind.form_problem(form):
            yield Finding((*keys, f"{table}.kind"), f'{problem}; set weights.format = "fp8-blocks" or "plain"')


def _there(model: Path) -> bool:
    return (model / "config.json").is_file()  # else the checks of models report it


def _uneven(create: CreateModelSettings) -> int:
    sizes = (create.hidden, create.heads * create.head_dim, create.ffn)
    return next((size for size in sizes if size % GROUP), 0)
