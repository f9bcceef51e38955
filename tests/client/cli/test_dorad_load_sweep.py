"""dorad-load: several loads in one call, their table and page, and data sets."""

import html.parser
import json
import re

import numpy as np
import pytest
from test_text import make_folder


def prompts(server):
    return [tuple(np.frombuffer(c.prompt_token_ids, "<i4").tolist()) for c in server.generate_calls]


def write_lines(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_a_sweep_runs_each_load_with_prompts_of_its_own(dorad_load, server):
    arguments = ["-c", "1,2,4", "--requests", 4, "--output-tokens", 2]
    reports = json.loads(dorad_load(*arguments, "-o", "json"))
    assert [report["concurrency"] for report in reports] == [1, 2, 4]
    assert [report["requests"] for report in reports] == [4, 4, 4]
    assert len(set(prompts(server))) == len(server.generate_calls) == 12
    reports = json.loads(dorad_load("--rate", "50,100", "--requests", 3, "-o", "json"))
    assert [report["offered_rate"] for report in reports] == [50, 100]


def test_a_sweep_is_a_table_with_a_row_for_each_load(dorad_load):
    lines = dorad_load("-c", "1,2", "--requests", 2, "--output-tokens", 2).splitlines()
    assert lines[0].split()[:4] == ["IN", "FLIGHT", "REQUESTS/S", "TOKENS/S"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]


@pytest.mark.parametrize(
    ("option", "text"),
    [("-c", "1,x"), ("-c", "4,2"), ("-c", "2,2"), ("-c", "0,1"), ("-c", "1,"), ("--rate", "0"),
     ("--rate", "-1"), ("-c", "1.5")],
)  # fmt: skip
def test_a_list_of_loads_that_is_none_is_refused(dorad_load, server, option, text):
    assert "is not a number above 0" in dorad_load(option, text, code=64)
    assert server.generate_calls == []


class Page(html.parser.HTMLParser):
    """What a page has, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loaded = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [v for k, v in attributes if k in ("src", "href", "data", "xlink:href")]
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


@pytest.mark.parametrize(("option", "loads"), [("-c", "3"), ("-c", "1,2,4"), ("--rate", "50,90")])
def test_a_page_shows_the_sweep_and_needs_no_other_file(dorad_load, tmp_path, option, loads):
    file = tmp_path / "sweep.html"
    out = dorad_load(option, loads, "--requests", 4, "--html", file, "-o", "json")
    text = file.read_text()
    page = Page(text)
    assert page.open == [] and page.loaded == [] and "http" not in text
    assert page.tags.count("svg") == 4
    runs = len(loads.split(","))
    assert page.tags.count("circle") == runs * 7  # One line of rates, three of two percentiles.
    assert page.tags.count("tr") == runs + 1
    inside = re.search(r"<pre>(.*)</pre>", text, re.S)[1]
    reports = json.loads(out)
    assert json.loads(inside) == (reports if runs > 1 else [reports])


def test_a_page_of_a_run_without_answers_is_made(dorad_load, server, tmp_path):
    server.capacity = 0
    file = tmp_path / "sweep.html"
    dorad_load("-c", "1,2", "--requests", 2, "--html", file, code=1)
    assert Page(file.read_text()).open == []


def test_a_page_without_a_folder_is_refused_before_the_run(dorad_load, server, tmp_path):
    assert "no folder" in dorad_load("--html", tmp_path / "none" / "a.html", code=64)
    assert server.generate_calls == []


def test_prompts_of_a_data_set_are_sent_in_order_and_again(dorad_load, server, tmp_path):
    file = write_lines(
        tmp_path / "data.jsonl", {"token_ids": [1, 2]}, {"prompt": [3], "max_tokens": 7, "id": 9}
    )
    dorad_load("-c", 1, "--requests", 5, "--data", file, "--output-tokens", 2)
    assert prompts(server) == [(1, 2), (3,), (1, 2), (3,), (1, 2)]
    assert [call.stop.max_tokens for call in server.generate_calls] == [2, 7, 2, 7, 2]


def test_processes_share_a_data_set(dorad_load, server, tmp_path):
    file = write_lines(tmp_path / "data.jsonl", *({"token_ids": [i]} for i in range(10, 16)))
    dorad_load("-c", 2, "--requests", 6, "--processes", 2, "--data", file, "--output-tokens", 1)
    assert sorted(prompts(server)) == [(i,) for i in range(10, 16)]


def test_texts_of_a_data_set_go_through_the_tokenizer(dorad_load, server, tmp_path):
    from dorad.text import ModelText

    folder = make_folder(tmp_path / "model")
    messages = [{"role": "user", "content": "hi"}]
    file = write_lines(tmp_path / "data.jsonl", {"prompt": "abc"}, {"messages": messages})
    dorad_load("-c", 1, "--requests", 2, "--data", file, "-m", folder, "--no-ignore-eos")
    text = ModelText(folder)
    assert prompts(server) == [tuple(text.encode("abc")), tuple(text.encode_chat(messages))]
    assert not any(call.stop.ignore_eos for call in server.generate_calls)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "Expecting property name"),
        ("[1]", "one of token_ids, prompt and messages"),
        ('{"token_ids": [1], "prompt": "a"}', "one of token_ids, prompt and messages"),
        ('{"token_ids": "abc"}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1, -1]}', "token_ids is not a list of token ids"),
        ('{"token_ids": []}', "the prompt is empty"),
        ('{"prompt": "hello"}', "needs the model's tokenizer: --model"),
        ('{"token_ids": [1], "max_tokens": 0}', "max_tokens is 0"),
    ],
)
def test_a_broken_line_of_a_data_set_is_named(dorad_load, server, tmp_path, line, told):
    file = tmp_path / "data.jsonl"
    file.write_text('{"token_ids": [1]}\n\n' + line + "\n")
    said = dorad_load("--data", file, code=64)
    assert told in said and f"{file}:3: " in said and server.generate_calls == []


def test_a_data_set_without_prompts_or_with_lengths_is_refused(dorad_load, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n")
    assert "has no prompts" in dorad_load("--data", file, code=64)
    assert "lengths" in dorad_load("--data", file, "--prompt-tokens", 3, code=64)
    assert "none.jsonl" in dorad_load("--data", tmp_path / "none.jsonl", code=64)
