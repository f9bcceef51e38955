"""Conversations with tools: their messages go through the model folder's chat template."""

import shutil
import sys
from pathlib import Path

import httpx
import pytest
from dorad.text import ModelText
from lib.gateway import running_gateway

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "client"))

from fake_server import FakeServer
from fake_server.encoding import ids

TEMPLATE = """\
{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{% for m in messages %}
{{ m.role }}{% if m.role == 'tool' %} {{ m.tool_call_id }}{% endif %}:{{ m.content }}
{% if 'tool_calls' in m %}
{% for c in m.tool_calls %}
<call {{ c.id }} {{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}=\
{{ v | tojson }}{% endfor %}>
{% endfor %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
"""

CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "assistant", "content": "Rain.", "tool_calls": []},
    {"role": "assistant", "content": "Still.", "tool_calls": None},
]
WRITTEN = (
    'user:Weather?\nassistant:\n<call c1 weather city="Köln" days=2>\n<call c2 now>\n'
    "tool c1:rain\ntool c2:noon\nassistant:Rain.\nassistant:Still.\n"
)


@pytest.fixture(scope="module")
def tools_folder(folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("tools") / "model"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def fake():
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def ask(fake, tools_folder, tmp_path_factory):
    """Sends a chat; returns the prompt that the server got."""
    text = ModelText(tools_folder)
    scratch = tmp_path_factory.mktemp("gateway")
    with running_gateway(fake.target, "--tokenizer", tools_folder, scratch=scratch) as running:

        def prompt(messages, **fields):
            body = {"model": "fake-model", "messages": messages, "max_tokens": 1, **fields}
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30)
            assert answer.status_code == 200, answer.text
            return text.decode(ids(fake.generate_calls[-1].prompt_token_ids))

        yield prompt


def test_calls_and_results_of_tools_reach_the_template(ask):
    assert ask(CONVERSATION) == WRITTEN + "assistant:"


def test_the_prompt_may_end_without_the_assistants_beginning(ask):
    assert ask(CONVERSATION, add_generation_prompt=False) == WRITTEN
    assert ask(CONVERSATION, chat_template_kwargs={"add_generation_prompt": False}) == WRITTEN


def test_tools_reach_the_template_as_a_variable(ask):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = ask(CONVERSATION[:1], chat_template_kwargs={"tools": tools})
    assert prompt.startswith("[weather]") and "user:Weather?" in prompt
