"""Every command that README.md and docs/ name exists, with its options and values; and what looks at them notices what does not."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import doc_commands
import pytest
from doc_commands import DocError, check_moestream, check_span, name_of, simple_commands

PAGES = doc_commands.pages()


def all_commands() -> list[doc_commands.Command]:
    return [
        command
        for page in PAGES
        for command in (
            *doc_commands.commands(name_of(page), page.read_text()),
            *doc_commands.unit_commands(name_of(page), page.read_text()),
        )
    ]


def test_commands_of_blocks_can_be_read() -> None:
    """Marked or not: each is read by the library that reads what a user types, and its values by what checks them."""
    wrong, seen = [], 0
    for command in all_commands():
        for words in simple_commands(command.text):
            if Path(words[0]).name == "moestream":
                seen += 1
                try:
                    check_moestream(words[1:])
                except DocError as error:
                    wrong.append(f"{command.where}: {command.text}: {error}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100


def test_commands_in_running_text_exist() -> None:
    wrong = []
    for page in PAGES:
        for line, span in doc_commands.spans(page.read_text()):
            try:
                check_span(span)
            except DocError as error:
                wrong.append(f"{name_of(page)}:{line}: `{span}`: {error}")
    assert not wrong, "\n".join(wrong)


def _anchors(text: str) -> set[str]:
    """What a heading is linked by, as GitHub makes it."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in (*PAGES, *doc_commands.ROOT.glob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = unquote(target).partition("#")
            if ":" in path:  # to another site
                continue
            file = (page.parent / path) if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file.read_text())):
                wrong.append(f"{page.name}: {target}")
    assert not wrong, wrong


def test_every_page_is_linked_from_another() -> None:
    texts = {page: page.read_text() for page in PAGES}
    for page in PAGES[1:]:
        assert any(f"{page.name}" in text for other, text in texts.items() if other != page), f"no page leads to {page.name}"


# ---- that mistakes are noticed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("moestream serve x.gguf", "there is no command 'serve'"),
        ("moestream trace rec x.gguf", "trace is a group of commands: record, info, replay"),
        ("moestream start --slot 32", "No such option"),
        ("moestream start --port 80800", "Invalid value for '--port'"),
        ("moestream start --io fast", "'fast' is not one of"),
        ("moestream start --slots some", "--slots some: expected a number"),
        ("moestream start --warm soon", "--warm soon: expected off"),
        ("moestream start x.gguf -- --port 1", "--port after -- collides with moestream's own --port"),
        ("moestream plan x.gguf --ram much", "--ram much: expected a size"),
        ("moestream plan x.gguf --slots map", "--slots map: expected a number"),
        ("moestream plan x.gguf --cache-type-k f8", "--cache-type-k f8: expected f32"),
        ("moestream bench x.gguf --slots 8,off", "--slots off: expected a number"),
        ("moestream bench x.gguf --vs ollama", "'ollama' is not"),
        ("moestream build --cuda-archs ada", "'ada' is no CUDA architecture"),
        ("moestream trace record x.gguf", "Missing option"),
        ("moestream pull hf:nobody", "hf:nobody"),
        ("moestream rm", "Missing argument"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, said: str) -> None:
    with pytest.raises(DocError) as caught:
        check_moestream(line.split()[1:])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ("moestream starts", "there is no command 'starts'"),
        ("moestream start … --detached", "moestream start has no option --detached"),
        ("moestream map show --top 8", "moestream map show has no option --top"),
        ("moestream --quiet", "moestream has no option --quiet"),
        ("make tests", "there is no make target 'tests'"),
        ("python bench/slow_box.py", "there is no bench/slow_box.py"),
    ],
)
def test_a_wrong_word_in_running_text_is_noticed(span: str, said: str) -> None:
    with pytest.raises(DocError, match=re.escape(said)):
        check_span(span)


def test_what_running_text_may_leave_open() -> None:
    for span in (
        "moestream start … -- --moe-trace FILE",
        "moestream map make --budget SIZE",
        "moestream.yaml",
        "make run MODEL=x.gguf",
    ):
        check_span(span)


def test_commands_of_a_page() -> None:
    text = "\n".join(
        [
            "<!-- not run `b`: a reason: with a colon -->", "```sh", "a 1   # comment", "# comment", "", "b 2 \\", "  --more", "```", "",
            "```text", "output", "$ c", "```", "<!-- not run: all of it -->", "```sh", "d", "```",
        ]
    )  # fmt: skip
    assert [(c.line, c.text, c.why_not) for c in doc_commands.commands("p", text)] == [
        (3, "a 1   # comment", None),
        (6, "b 2 \\\n  --more", "a reason: with a colon"),
        (12, "c", None),
        (16, "d", "all of it"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nx\n```", "p:1: a block of no language"),
        ("```bash\nx\n```", "p:1: a block of 'bash'"),
        ("```sh\nx", "p:1: the block does not end"),
        ("<!-- not run: why -->\n\n```sh\nx\n```", "a mark that stands in front of no block"),
        ("<!-- not run: why -->", "a mark that stands in front of no block"),
        ("<!-- not run -->\n```sh\nx\n```", "not understood: <!-- not run -->"),
        ("<!-- not run `y`: why -->\n```sh\nx\n```", "the mark of no command in the block: y"),
    ],
)
def test_a_wrong_page_is_noticed(text: str, said: str) -> None:
    with pytest.raises(DocError, match=re.escape(said)):
        doc_commands.commands("p", text)


def test_words_that_a_shell_would_see() -> None:
    assert simple_commands("sudo A=1 nice x 'a b' > f && y --z | w # '") == [["nice", "x", "a b"], ["y", "--z"], ["w"]]
    assert simple_commands("x \\\n  y") == [["x", "y"]]
