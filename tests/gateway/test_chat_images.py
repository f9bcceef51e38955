"""Chats with images: the gateway's prompt is that of the model's own processor, and a user's
mistakes are refused by name."""

import asyncio
import base64
import functools
import io
import os
import struct
import sys
import zlib
from types import SimpleNamespace

import dorad
import httpx
import openai
import PIL.Image
import pytest
from dorad.gateway.errors import Refusal
from dorad.gateway.images import Images
from dorad.text import ModelText
from lib.gateway import running_gateway
from lib.pictures import data_url, encoded, photo, place_of, processed
from lib.server import serve
from lib.toxics import BadNetwork, Toxic
from lib.zygote import PICTURES

pytestmark = pytest.mark.timeout(180)

MAX_IMAGES, MAX_TOKENS = 3, 30
# A gateway imports transformers for its first picture; that of most tests here has it.
quick_gateway = functools.partial(running_gateway, imports=PICTURES)
SAMPLED = {"max_tokens": 6, "temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(zoo):
    return zoo.model_with_processor("qwen3_vl")


@pytest.fixture(scope="module")
def server(folder, zoo):
    settings = {"limits.max_images": MAX_IMAGES, "limits.max_image_tokens": MAX_TOKENS}
    adapters = {"tower": zoo.adapter("qwen3_vl", "dora_tower")}
    with serve(folder, adapters, settings) as running:
        yield running


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Allowed: root. Beside it: a picture that is not."""
    base = tmp_path_factory.mktemp("files")
    root = base / "root"
    (root / "below").mkdir(parents=True)
    (base / "outside.png").write_bytes(encoded(photo(9, 8, 8)))
    (base / "root-beside").mkdir()
    (base / "root-beside" / "a.png").write_bytes(encoded(photo(9, 8, 8)))
    (root / "a b.png").write_bytes(encoded(photo(1, 12, 8)))
    (root / "below" / "b.png").write_bytes(encoded(photo(1, 12, 8)))
    (root / "text.png").write_text("hello")
    (root / "link.png").symlink_to(base / "outside.png")
    (root / "nowhere.png").symlink_to(base / "nothing.png")
    (root / "inner.png").symlink_to(root / "below" / "b.png")
    (root / "up").symlink_to(base)
    os.mkfifo(root / "pipe.png")
    return root


@pytest.fixture(scope="module")
def http(server, folder, root, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("images")
    arguments = ["--tokenizer", folder, "--image-root", root, "--served-model-name", "base"]
    with (
        running_gateway(server.grpc, *arguments, scratch=scratch) as running,
        httpx.Client(base_url=running.url, timeout=60) as it,
    ):
        yield it
        assert running.log()  # Libraries' warnings are lines of JSON, too.


@pytest.fixture(scope="module")
def grpc_client(server):
    with dorad.Client(server.grpc) as it:
        yield it


def text(words):
    return {"type": "text", "text": words}


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(http, *parts, **options):
    body = {"model": "base", "messages": [{"role": "user", "content": list(parts)}]}
    return http.post("/v1/chat/completions", json={**body, **SAMPLED, **options})


def error_of(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return error


def test_prompt_and_answer_are_those_of_the_models_own_processor(http, grpc_client, folder):
    answers_are_those_of_transformers(http, grpc_client, folder, "qwen3_vl")


@pytest.mark.parametrize("family", ["mistral3", "gemma3"])
def test_so_are_those_of_other_families(zoo, tmp_path, family):
    folder = zoo.model_with_processor(family)
    with (
        serve(folder, {"tower": zoo.adapter(family, "dora_tower")}) as server,
        quick_gateway(
            server.grpc, "--tokenizer", folder, "--served-model-name", "base", scratch=tmp_path
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
        dorad.Client(server.grpc) as client,
    ):
        answers_are_those_of_transformers(http, client, folder, family)
        thin = chat(http, image(data_url(encoded(photo(1, 1, 900)))))
        if family == "mistral3":
            error = error_of(thin)
            assert error["code"] == "IMAGE_INVALID" and "refuses a picture" in error["message"]
        else:  # All of Gemma's have one size.
            assert thin.status_code == 200


def answers_are_those_of_transformers(http, grpc_client, folder, family):
    pictures = [photo(1, 12, 8), photo(2, 9, 21), photo(3, 20, 22)]
    parts = [text("Look: "), image(data_url(encoded(pictures[0]))), text(" and ")]
    parts += [image(data_url(encoded(p)), detail="auto") for p in pictures[1:]]
    messages = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": [text("Ä "), text("?")]},
    ]
    place = place_of(family)
    written = f"system: Be terse.\nuser: Look: {place} and {place}{place}\n"
    written += "assistant: What?\nuser: Ä ?\nassistant: "
    ids, images = processed(family, written, pictures, ModelText(folder))
    for model in (None, "tower"):
        body = {"model": model or "base", "messages": messages, "logprobs": True, **SAMPLED}
        answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True, "n": 2})
        assert answer.status_code == 200, answer.text
        answer = answer.json()
        assert answer["prompt_token_ids"] == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)
        samples = grpc_client.generate(
            ids, images=images, adapter=model, n=2, logprobs="raw", **SAMPLED
        )
        for choice, sample in zip(answer["choices"], samples, strict=True):
            assert choice["token_ids"] == sample.token_ids.tolist()
            found = [row["logprob"] for row in choice["logprobs"]["content"]]
            assert found == sample.logprobs.tolist()
    tokens = http.post("/tokenize", json={"model": "base", "messages": messages}).json()
    assert tokens["tokens"] == ids


def test_the_official_client_streams_a_chat_about_an_image(http):
    content = [text("What is it?"), image(data_url(encoded(photo(1, 12, 8))), detail="high")]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
        options = {
            "model": "base",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 6,
            "seed": 3,
        }
        whole = client.chat.completions.create(**options).choices[0].message.content
        stream = client.chat.completions.create(**options, stream=True)
        parts = [event.choices[0].delta.content or "" for event in stream]
    assert whole and "".join(parts) == whole


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt_token_ids"], answer.json()["choices"][0]["token_ids"]


def ask(http, url):
    return tokens_of(chat(http, url, text("?"), return_token_ids=True))


def test_a_url_may_be_a_string_and_the_format_jpeg_or_webp(http):
    picture = photo(1, 12, 8)
    expected = ask(http, image(data_url(encoded(picture))))
    plain = {"type": "image_url", "image_url": data_url(encoded(picture))}
    assert ask(http, plain) == expected
    assert ask(http, image(data_url(encoded(picture, "WEBP", lossless=True), "webp"))) == expected
    assert ask(http, image(data_url(encoded(picture, "WEBP", lossless=True), "png"))) == expected
    url = data_url(encoded(picture, "JPEG", quality=95), "jpeg")
    assert len(ask(http, image(url))[0]) == len(expected[0])
    assert ask(http, image("DATA:IMAGE/PNG;BASE64," + url_data(encoded(picture)))) == expected


def url_data(data):
    return base64.b64encode(data).decode()


@pytest.mark.filterwarnings("ignore:Palette images")
@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "I;16", "CMYK"])
def test_pictures_of_every_mode_are_read_as_transformers_does(http, grpc_client, folder, mode):
    picture = photo(4, 10, 10, "RGB").convert("I") if mode == "I;16" else photo(4, 10, 10, mode)
    picture = picture.convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    data = encoded(picture, kind)
    ids, images = processed(
        "qwen3_vl",
        f"user: {place_of('qwen3_vl')}?\nassistant: ",
        [PIL.Image.open(io.BytesIO(data))],
        ModelText(folder),
    )
    (sample,) = grpc_client.generate(ids, images=images, **SAMPLED)
    expected = (ids, sample.token_ids.tolist())
    assert ask(http, image(data_url(data, kind.lower()))) == expected


def test_a_turned_photo_is_upright(http):
    upright = photo(1, 12, 8)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # To be turned by a quarter.
    turned = encoded(upright.transpose(PIL.Image.Transpose.ROTATE_90), exif=exif)
    assert ask(http, image(data_url(turned))) == ask(http, image(data_url(encoded(upright))))


def test_files_below_the_root_are_read(http, root):
    expected = ask(http, image(data_url(encoded(photo(1, 12, 8)))))
    for url in (
        f"file://{root}/a%20b.png",
        f"file://localhost{root}/below/b.png",
        f"file://{root}/inner.png",
        f"file://{root}/below/../below/b.png",
    ):
        assert ask(http, image(url)) == expected


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/../outside.png", 403, "PATH_NOT_ALLOWED"),
        ("/%2e%2e/outside.png", 403, "PATH_NOT_ALLOWED"),
        ("/../nothing.png", 403, "PATH_NOT_ALLOWED"),
        ("/../root-beside/a.png", 403, "PATH_NOT_ALLOWED"),
        ("/link.png", 403, "PATH_NOT_ALLOWED"),
        ("/nowhere.png", 403, "PATH_NOT_ALLOWED"),
        ("/up/outside.png", 403, "PATH_NOT_ALLOWED"),
        ("/up", 403, "PATH_NOT_ALLOWED"),
        ("/missing.png", 404, "FILE_NOT_FOUND"),
        ("/below", 404, "FILE_NOT_FOUND"),
        ("", 404, "FILE_NOT_FOUND"),
        ("/pipe.png", 404, "FILE_NOT_FOUND"),
        ("/text.png", 400, "IMAGE_INVALID"),
        ("/below/b.png?x=1", 400, "IMAGE_INVALID"),
        ("/a%00.png", 400, "IMAGE_INVALID"),
    ],
)
def test_no_path_leads_out_of_the_root(http, root, path, status, reason):
    error = error_of(chat(http, image(f"file://{root}{path}")), status)
    assert error["code"] == reason
    assert error["param"] == "messages[0].content[0].image_url"


@pytest.mark.parametrize("url", ["file://host/etc/passwd", "file:a.png", "file://"])
def test_a_files_url_has_an_absolute_path_and_no_host(http, url):
    assert error_of(chat(http, image(url)))["code"] == "IMAGE_INVALID"


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ"])
def test_system_files_are_out_of_reach(http, path):
    error = error_of(chat(http, image(f"file://{path}")), 403)
    assert error["code"] == "PATH_NOT_ALLOWED" and "--image-root" in error["message"]


def png(width, height):
    """A PNG whose header promises so many pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


PNG = encoded(photo(1, 12, 8))
MOVING = encoded(
    photo(1, 8, 8), "WEBP", save_all=True, append_images=[photo(2, 8, 8)], lossless=True
)
BAD_URLS = [
    ("http", "http://127.0.0.1:1/a.png", "IMAGE_URL_UNSUPPORTED", "not fetched"),
    ("https", "HTTPS://example.com/a.png", "IMAGE_URL_UNSUPPORTED", "data URL"),
    ("ftp", "ftp://example.com/a.png", "IMAGE_URL_UNSUPPORTED", "neither"),
    ("path", "/etc/passwd", "IMAGE_URL_UNSUPPORTED", "neither"),
    ("empty", "", "IMAGE_URL_UNSUPPORTED", "neither"),
    ("bare-base64", url_data(PNG), "IMAGE_URL_UNSUPPORTED", "neither"),
    ("no-media-type", "data:;base64,AAAA", "IMAGE_INVALID", "begins with"),
    ("video", "data:video/mp4;base64,AAAA", "IMAGE_INVALID", "begins with"),
    ("gif", "data:image/gif;base64,AAAA", "IMAGE_INVALID", "begins with"),
    ("svg", "data:image/svg+xml;base64,AAAA", "IMAGE_INVALID", "begins with"),
    ("percent", "data:image/png,%89PNG", "IMAGE_INVALID", "begins with"),
    ("no-comma", "data:image/png;base64", "IMAGE_INVALID", "begins with"),
    ("not-base64", "data:image/png;base64,@@@@", "IMAGE_INVALID", "base64"),
    ("unicode", "data:image/png;base64,ÄÄÄÄ", "IMAGE_INVALID", "base64"),
    ("cut-base64", data_url(PNG)[:-3], "IMAGE_INVALID", "base64"),
    ("no-data", "data:image/png;base64,", "IMAGE_INVALID", "no PNG"),
    ("text", data_url(b"hello"), "IMAGE_INVALID", "no PNG"),
    ("gif-as-png", data_url(encoded(photo(1, 8, 8), "GIF")), "IMAGE_INVALID", "no PNG"),
    ("truncated", data_url(PNG[: len(PNG) // 2]), "IMAGE_INVALID", "cannot be read"),
    ("cut-header", data_url(PNG[:20]), "IMAGE_INVALID", ""),
    ("cut-jpeg", data_url(encoded(photo(1, 64, 64), "JPEG")[:900], "jpeg"), "IMAGE_INVALID", ""),
    ("bomb", data_url(png(10_000, 10_000)), "IMAGE_INVALID", "more than"),
    ("big-bomb", data_url(png(2**31 - 1, 2**31 - 1)), "IMAGE_INVALID", "more than"),
    ("moving", data_url(MOVING, "webp"), "IMAGE_INVALID", "one frame"),
    ("line", data_url(encoded(photo(1, 1, 900))), "IMAGE_INVALID", "aspect"),
]


@pytest.mark.parametrize(
    ("url", "reason", "words"), [c[1:] for c in BAD_URLS], ids=[c[0] for c in BAD_URLS]
)
def test_a_bad_url_or_picture_is_refused_by_its_reason(http, url, reason, words):
    error = error_of(chat(http, text("?"), image(url)))
    assert error["code"] == reason and error["type"] == "invalid_request_error"
    assert words in error["message"] and len(error["message"]) < 400
    ask(http, image(data_url(PNG)))


BAD_PARTS = [
    ("video", {"type": "video_url", "video_url": {"url": "x"}}, "VIDEO_UNSUPPORTED", "videos"),
    ("audio", {"type": "input_audio", "input_audio": {}}, "AUDIO_UNSUPPORTED", "sounds"),
    ("audio-url", {"type": "audio_url", "audio_url": {}}, "AUDIO_UNSUPPORTED", "sounds"),
    ("file", {"type": "file", "file": {}}, "FIELD_INVALID", "text and image_url"),
    ("hugging-face", {"type": "image", "url": "x"}, "FIELD_INVALID", "text and image_url"),
    ("responses", {"type": "input_image", "image_url": "x"}, "FIELD_INVALID", "input_image"),
    ("no-type", {"text": "x"}, "FIELD_INVALID", "text and image_url"),
    ("number", 7, "FIELD_INVALID", "text and image_url"),
    ("type-is-a-list", {"type": ["text"]}, "FIELD_INVALID", "text and image_url"),
    ("no-url", {"type": "image_url"}, "FIELD_MISSING", ""),
    ("empty-object", {"type": "image_url", "image_url": {}}, "FIELD_MISSING", ""),
    ("number-as-url", {"type": "image_url", "image_url": 7}, "FIELD_INVALID", ""),
    ("null-url", {"type": "image_url", "image_url": {"url": None}}, "FIELD_MISSING", ""),
    ("detail", image(data_url(PNG), detail="huge"), "FIELD_INVALID", ""),
]


@pytest.mark.parametrize(
    ("part", "reason", "words"), [c[1:] for c in BAD_PARTS], ids=[c[0] for c in BAD_PARTS]
)
def test_a_part_of_another_kind_is_refused_by_name(http, part, reason, words):
    error = error_of(chat(http, text("?"), part))
    assert error["code"] == reason, error
    assert error["param"].startswith("messages[0].content[1]") and words in error["message"]


def test_the_servers_limits_hold(http):
    one = image(data_url(PNG))
    assert error_of(chat(http, *[one] * (MAX_IMAGES + 1)))["code"] == "IMAGES_TOO_MANY"
    assert chat(http, *[one] * MAX_IMAGES).status_code == 200
    error = error_of(chat(http, image(data_url(encoded(photo(1, 200, 200))))))
    assert error["code"] == "IMAGE_TOO_LARGE" and str(MAX_TOKENS) in error["message"]


@pytest.mark.parametrize("words", ["<|image_pad|>", "a <|image_pad|><|image_pad|> b"])
def test_a_text_with_the_placeholder_is_refused(http, words):
    error = error_of(chat(http, text(words), image(data_url(PNG))))
    assert error["code"] == "IMAGE_INVALID" and "placeholder" in error["message"]
    assert error_of(chat(http, text(words)))["code"] == "IMAGE_UNEXPECTED"


@pytest.mark.parametrize("count", [-1, 5])
def test_truncation_does_not_go_with_images(http, count):
    error = error_of(chat(http, image(data_url(PNG)), truncate_prompt_tokens=count))
    assert (error["code"], error["param"]) == ("FIELD_UNSUPPORTED", "truncate_prompt_tokens")


def test_without_a_root_no_file_is_read(server, folder, root, tmp_path):
    with (
        quick_gateway(
            server.grpc, "--tokenizer", folder, "--served-model-name", "base", scratch=tmp_path
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        error = error_of(chat(http, image(f"file://{root}/a%20b.png")), 403)
        assert error["code"] == "PATH_NOT_ALLOWED" and "--image-root" in error["message"]


def test_a_server_of_texts_takes_no_images(zoo, tmp_path):
    folder = zoo.model_with_tokenizer("llama2")
    with (
        serve(folder) as server,
        running_gateway(
            server.grpc, "--tokenizer", folder, "--served-model-name", "base", scratch=tmp_path
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        error = error_of(chat(http, image(data_url(PNG))))
        assert error["code"] == "IMAGE_UNSUPPORTED" and "text" in error["message"]


def test_a_folder_without_a_processor_is_refused_by_name(server, zoo, tmp_path):
    folder = zoo.model_with_tokenizer("qwen3_vl")
    with (
        quick_gateway(
            server.grpc, "--tokenizer", folder, "--served-model-name", "base", scratch=tmp_path
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        error = error_of(chat(http, image(data_url(PNG))))
        assert error["code"] == "IMAGES_NOT_CONFIGURED"
        assert "preprocessor_config.json" in error["message"]


@pytest.mark.parametrize("missing", ["PIL", "transformers.models.auto.image_processing_auto"])
def test_a_missing_library_names_its_extra(folder, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"{missing}.Image", raising=False)
    images = Images(ModelText(folder))
    limits = SimpleNamespace(max_image_tokens=9)
    with pytest.raises(Refusal) as error:
        asyncio.run(images.place("", {"url": data_url(PNG)}, limits, special_tokens=False))
    assert error.value.reason == "IMAGES_NOT_CONFIGURED" and error.value.status == 400
    assert "pip install 'dorad[images]'" in error.value.message


def test_the_servers_get_an_image_once(server, folder, tmp_path):
    """For all requests, of callers with different metadata, whole and streamed."""
    size = 28 * 4 * 24 * 4  # bytes of pixels: tokens, patches of each, elements of each, fp32
    url = data_url(encoded(photo(77, 16, 28)))
    with (
        BadNetwork(server.grpc, Toxic()) as network,
        quick_gateway(
            network.target, "--tokenizer", folder, "--served-model-name", "base", scratch=tmp_path
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):

        def sent(**options):
            before = network.sent
            assert chat(http, image(url), text("?"), **options).status_code == 200
            return network.sent - before

        assert sent() > size
        for number in range(3):
            http.headers["authorization"] = f"Bearer caller-{number}"
            assert sent(n=4) < size / 2
            assert sent(stream=True) < size / 2
            assert sent(stop="zzz") < size / 2
