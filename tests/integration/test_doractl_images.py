"""`doractl generate --image`: the prompt of the model's own processor, and a user's mistakes."""

import json

import dorad
import pytest
from dorad.cli.app import app
from dorad.text import ModelText
from lib.pictures import encoded, photo, place_of, processed
from lib.server import serve
from typer.testing import CliRunner

pytestmark = [
    pytest.mark.usefixtures("own_environment"),
]

USAGE, FAILURE = 64, 1


@pytest.fixture
def own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("DORAD_MODEL", "DORAD_TARGET", "DORAD_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model(zoo):
    return zoo.model_with_processor("qwen3_vl")


@pytest.fixture(scope="module")
def server(model):
    with serve(model, {}) as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number, (height, width) in enumerate([(12, 8), (9, 21)]):
        (folder / f"{number}.png").write_bytes(encoded(photo(number, height, width)))
    (folder / "text.png").write_text("hello")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:100])
    return folder


def run(server, *arguments, code=0):
    line = ["generate", *map(str, arguments), "--target", server.grpc, "-o", "json"]
    result = CliRunner().invoke(app, line, prog_name="doractl")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout) if code == 0 else " ".join(result.stderr.split())


@pytest.mark.parametrize("family", ["qwen3_vl", "mistral3", "gemma3"])
def test_pictures_stand_before_the_text_as_the_processor_prepares_them(zoo, files, family):
    model, place = zoo.model_with_processor(family), place_of(family)
    written = f"system: Be terse.\nuser: {place}{place}Which?\nassistant: "
    pictures = [photo(0, 12, 8), photo(1, 9, 21)]
    ids, images = processed(family, written, pictures, ModelText(model))
    other_images = processed(family, written, [photo(5, 12, 8), pictures[1]], ModelText(model))[1]
    options = {"max_tokens": 24, "seed": 7, "ignore_eos": True}
    with serve(model, {}) as server:
        with dorad.Client(server.grpc) as client:
            (expected,) = client.generate(ids, images=images, **options)
            (other,) = client.generate(ids, images=other_images, **options)
        (answer,) = run(
            server, "Which?", "--model", model, "--system", "Be terse.",
            "--image", files / "0.png", "--image", files / "1.png",
            "--max-tokens", 24, "--seed", 7, "--ignore-eos",
        )  # fmt: skip
    assert answer["token_ids"] == expected.token_ids.tolist() != other.token_ids.tolist()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["?", "--image", "{files}/none.png"], USAGE, "No such file"),
        (["?", "--image", "{files}"], USAGE, "Is a directory"),
        (["?", "--image", "{files}/text.png"], USAGE, "no PNG, JPEG or WebP"),
        (["?", "--image", "{files}/cut.png"], USAGE, "cannot be read"),
        (["?", "--image", "{files}/0.png", "--raw"], USAGE, "not with --raw"),
        (["--token-ids", "5,6", "--image", "{files}/0.png"], USAGE, "not with --token-ids"),
        (["a <|image_pad|> b", "--image", "{files}/0.png"], USAGE, "2 placeholders for 1 images"),
    ],
)
def test_a_users_mistake_is_named(server, model, files, arguments, code, words):
    arguments = [argument.format(files=files) for argument in arguments]
    assert words in run(server, *arguments, "--model", model, code=code)


def test_pictures_need_the_models_folder(server, files):
    assert "--model" in run(server, "?", "--image", files / "0.png", code=USAGE)


def test_a_folder_without_a_processor_is_named(server, zoo, files):
    folder = zoo.model_with_tokenizer("qwen3_vl")
    message = run(server, "?", "--image", files / "0.png", "--model", folder, code=USAGE)
    assert "preprocessor_config.json" in message


def test_a_model_of_text_is_named(server, zoo, files):
    folder = zoo.model_with_tokenizer("llama2")
    message = run(server, "?", "--image", files / "0.png", "--model", folder, code=USAGE)
    assert "'llama'" in message and "qwen3_vl" in message


def test_a_template_without_images_is_named(server, zoo, model, files, tmp_path):
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    image = ["?", "--image", files / "0.png", "--model", tmp_path]
    assert "chat template" in run(server, *image, code=USAGE)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}user{% endfor %}")
    assert "0 placeholders for 1 images" in run(server, *image, code=USAGE)


def test_a_server_of_text_refuses_the_image(zoo, model, files):
    with serve(zoo.model("llama2")) as other:
        message = run(other, "?", "--image", files / "0.png", "--model", model, code=FAILURE)
        assert "IMAGE_UNSUPPORTED" in message
