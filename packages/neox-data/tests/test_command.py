import signal
import subprocess
import sys

from neox_data.command import one_option_per_word
from neox_data.tokenizers.train import ended_by_ctrl_c

SEVERAL = frozenset({"--input", "--keys"})


def spread(line: str) -> str:
    return " ".join(one_option_per_word(line.split(), SEVERAL))


def test_words_after_an_option_of_several_get_the_option_each() -> None:
    assert spread("--input a b --flag --keys x y --other p") == (
        "--input a --input b --flag --keys x --keys y --other p"
    )


def test_other_arguments_are_unchanged() -> None:
    assert spread("a --other b c --input=d -x --input e") == "a --other b c --input=d -x --input e"


def test_ctrl_c_ends_uninterruptible_code() -> None:
    script = (
        "import os, signal\n"
        "from neox_data.tokenizers.train import ended_by_ctrl_c\n"
        "with ended_by_ctrl_c():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_handler_of_ctrl_c_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before
