"""Options from flags and from a file."""

import dataclasses

import pytest

from kvjax.command.decode_options import DecodeConfig, decode_parser
from kvjax.command.options import parse
from kvjax.command.yaml_file import dump_yaml, read_yaml
from kvjax.decode import main
from kvjax.errors import UsageError


def options(*argv: str) -> DecodeConfig:
    return parse(DecodeConfig, decode_parser(), argv)[0]


@pytest.fixture
def file(tmp_path):
    """A config file of these lines."""

    def write(*lines: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_flags_win_over_the_file_and_the_file_over_the_defaults(file):
    path = file("max-new-tokens: 7", "seed: 3", "thinking: on", "top_p: 1e-1", "stream: true")
    config = options("--config", path, "--seed", "4", "--no-stream")
    expected = DecodeConfig(max_new_tokens=7, seed=4, thinking="on", top_p=0.1, stream=False)
    assert config == expected


def test_aliases_name_the_same_option():
    short = options("-p", "a", "--max-tokens", "5", "--temp", "0.5", "-o", "b")
    assert short == DecodeConfig(prompt="a", max_new_tokens=5, temperature=0.5, output="b")


def test_a_flag_replaces_the_file_s_alternatives(file):
    path = file("prompts: rows.jsonl", "greedy: true", "top_k: 3")
    config = options("--config", path, "--prompt", "hi", "--temperature", "0.7")
    assert config == DecodeConfig(prompt="hi", temperature=0.7, top_k=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_token: 5", "unknown key 'max_token'; did you mean max_new_tokens?"),
        ("zzz: 5", "unknown key 'zzz'; known are model"),
        ("seed: 1.5", "seed must be a whole number, got 1.5"),
        ("seed: true", "seed must be a whole number, got True"),
        ("seed: null", "seed must be a whole number, got None"),
        ("top_p: high", "top_p must be a number, got 'high'"),
        ("greedy: yes", "greedy must be true or false, got 'yes'"),
        ("revision: 12", "revision must be text (quote it if it looks like a number), got 12"),
        ("thinking: maybe", "thinking must be one of on, off, auto, got 'maybe'"),
        ("seed: 1\nseed: 2", "'seed' stands twice"),
        ("- seed", "must hold `key: value` lines, got list"),
        ("seed: [1", "is not valid YAML"),
        ("stream: !!bool maybe", "is not valid YAML"),
        ("model: !!timestamp x", "is not valid YAML"),
        ("temperature: " + "9" * 401, "temperature must be a number"),
        ("seed: " + "9" * 401, "--seed must be at least 0 and at most"),
        ("model: ''", "--model is empty"),
        ("top_p: 1.5", "--top-p must be above 0 and at most 1, got 1.5"),
        ("temperature: .nan", "--temperature must be at least 0, got nan"),
    ],
)
def test_a_wrong_file_is_refused(file, line, message):
    with pytest.raises(UsageError) as error:
        options("--config", file(line))
    assert message in " ".join(str(error.value).split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "-1"], "--seed must be at least 0 and at most 4294967295, got -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--batch-size", "-3"], "--batch-size must be at least 1, got -3"),
        (["--temperature", "inf"], "--temperature must be at least 0, got inf"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["--kernel", "cudnn"], "argument --kernel: invalid choice: 'cudnn'"),
        (["--page-size", "48"], "--page-size must be a power of two, got 48"),
        (["--seed", "x"], "invalid int value: 'x'"),
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--promt", "a"], "unrecognized arguments: --promt a"),
        (["-p", "a", "--prompts", "b"], "--prompt and --prompts exclude each other"),
        (["--greedy", "--temp", "1"], "--temperature and --greedy exclude each other"),
        (["--system-prompt", "a", "--no-chat-template"], "--system-prompt needs the chat template"),
        (["--prompts", "a", "--stream"], "--stream is for one prompt"),
        (["--stream", "--format", "json"], "--stream prints text"),
        (["--config", "no/such.yaml"], "cannot read no/such.yaml: No such file"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(capsys, argv, message):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvjax: ") and err.count("\n") == 1
    assert message in err


def test_printed_options_read_back_to_the_same(capsys, tmp_path):
    argv = ["-p", 'on: "x"\n  # 1e3', "--revision", "12", "--thinking", "off", "--top-p", "1e-05"]
    assert main([*argv, "--print-config"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    assert options("--config", str(path)) == options(*argv)


@pytest.mark.parametrize("text", ["on", "1e-3", "1_000", "0x1f", "~", "null", "2024-01-01", "é\n"])
def test_text_that_looks_like_something_else_survives_yaml(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(dump_yaml({"key": text}))
    assert read_yaml(str(path)) == {"key": text}


def test_help_names_every_option(capsys):
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    for field in dataclasses.fields(DecodeConfig):
        assert "--" + field.name.replace("_", "-") in help_text


def test_a_switch_that_is_off_replaces_nothing_of_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("temperature: 0.7\n")
    config, _ = parse(DecodeConfig, decode_parser(), ["--config", str(file), "--no-greedy"])
    assert config.temperature == 0.7
