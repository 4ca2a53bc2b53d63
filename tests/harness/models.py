"""Small models on disk."""

from pathlib import Path

from safetensors.numpy import load_file, save_file

from asyncrl.training.init_model import ModelShape, create_model


def make_endless_model(directory, seed=1, shape=None, spread=1.0, template=""):
    """A model whose likeliest token is never the one that ends: its special tokens have logit 0.

    The other logits are `spread` times those of an untrained model; with 30, one token in tens of thousands ends.
    """
    create_model(
        directory,
        alphabet="abcdefghijklmnopqrstuvwxyz0123456789+=^",
        seed=seed,
        shape=shape or ModelShape(context=1024),
        template=template,
    )
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= spread
    weights["lm_head.weight"][:3] = 0
    save_file(weights, file, metadata={"format": "pt"})


def made_model(directory: Path) -> Path:
    create_model(directory, alphabet="abcdefghijklmnopqrstuvwxyz0123456789+=^", seed=1)
    return directory
