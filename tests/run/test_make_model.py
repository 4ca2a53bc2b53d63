import pytest

from asyncrl.config.settings import Config
from asyncrl.data.model_dir import check_model_directory
from asyncrl.errors import LaunchError
from asyncrl.run.launch import make_model
from harness.launches import prepared


async def test_a_model_that_cannot_be_made_ends_the_start_and_says_why(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes").touch()
    with pytest.raises(LaunchError, match=r"the model could not be made: .*model is not empty"):
        await make_model(tmp_path / "model", Config())


async def test_a_start_that_was_killed_while_it_made_the_model_is_followed_by_one_that_makes_it(tmp_path):
    launch = prepared(tmp_path)
    half = launch.files.model.with_name("model.partial")
    half.mkdir()
    (half / "config.json").write_text("{")

    await launch._make_model()

    check_model_directory(launch.files.model)
    assert not half.exists()
