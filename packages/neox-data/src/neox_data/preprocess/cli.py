"""`preprocess_data`: convert text files to indexed datasets, with GPT-NeoX's options."""

from pathlib import Path

import click
from click.core import ParameterSource
from cloup import OptionGroup, option

from neox_data.amount_progress import report_progress
from neox_data.command import Command, log_interval_option, more_files_argument, quiet_option
from neox_data.preprocess.chat_template import load_chat_template
from neox_data.preprocess.chat_tokens import EndOfAnswer, end_of_answer
from neox_data.preprocess.inputs import ENDINGS, find_inputs
from neox_data.preprocess.loss_mask import ChatMask, LossMask, PromptMask
from neox_data.preprocess.options import Options
from neox_data.preprocess.passed_over import PassedOver
from neox_data.preprocess.read import MAX_DOCUMENT_BYTES
from neox_data.preprocess.run import preprocess
from neox_data.preprocess.shards import preprocess_resumably, take_shard
from neox_data.preprocess.threads import prepare_threads
from neox_data.tokenizers import GPT_NEOX_NAMES, TOKENIZERS, Tokenizer, build_tokenizer

__all__ = ["main"]

_NO_END_NOTE = (
    "note: without --append-eod nothing separates the documents; most runs, and those that reset "
    "positions or attention masks at document ends, require it"
)
# Options that only some kinds of loss mask use; None: without a loss mask. It never uses gigatoken, so that
# --exact would change nothing.
_USED_WITH: dict[str, tuple[str | None, ...]] = {
    "keys": (None,),
    "split_long_documents": (None,),
    "ftfy": (None,),
    "exact": (None,),
    "prompt_key": ("prompt-response",),
    "response_key": ("prompt-response",),
    "messages_key": ("chat",),
    "chat_template": ("chat",),
}
_CORPUS, _MASK, _TOKENIZER = OptionGroup("Corpus"), OptionGroup("Loss mask"), OptionGroup("Tokenizer")
_OUTPUT, _RUN = OptionGroup("Output"), OptionGroup("Speed")


@click.command(
    "preprocess_data",
    cls=Command,
    examples=(
        "preprocess_data --input texts/*.jsonl --tokenizer-type HFTokenizer --vocab-file tokenizer.json "
        "--append-eod --output-prefix data/corpus",
        "preprocess_data --input chats.jsonl --loss-mask chat --tokenizer-type HFTokenizer "
        "--vocab-file model/tokenizer.json --output-prefix data/chats",
    ),
)
@click.version_option(package_name="neox-data")
@option(
    "--input",
    "inputs",
    group=_CORPUS,
    required=True,
    multiple=True,
    metavar="FILE",
    help=f"Corpus files ({ENDINGS}) or folders: several names, a quoted pattern, or a comma-separated list.",
)
@more_files_argument
@option(
    "--jsonl-keys",
    "--json-keys",
    "keys",
    group=_CORPUS,
    multiple=True,
    default=("text",),
    metavar="KEY",
    help="Key of the texts in each JSON line. May be repeated; each key becomes a dataset.",
)
@option(
    "--loss-mask",
    group=_MASK,
    type=click.Choice(["prompt-response", "chat"]),
    help="Write tokens and labels, so that the loss counts only responses to prompts (PREFIX_text_document, "
    "PREFIX_label_document), or only the assistant's messages (PREFIX_KEY_document, "
    "PREFIX_KEY_label_document).",
)
@option("--prompt-key", group=_MASK, default="prompt", show_default=True, help="Key of prompts.")
@option("--response-key", group=_MASK, default="response", show_default=True, help="Key of responses.")
@option(
    "--messages-key", group=_MASK, default="messages", show_default=True, help="Key of lists of messages."
)
@option(
    "--chat-template",
    group=_MASK,
    type=click.Path(path_type=Path, exists=True),
    help="Folder of a tokenizer with a chat template, or a file of Jinja.  [default: the folder of "
    "--vocab-file]",
)
@option(
    "--num-docs",
    group=_CORPUS,
    type=click.IntRange(1),
    help="Number of documents, for the progress bar.  [default: estimate progress by bytes]",
)
@option(
    "--tokenizer-type",
    group=_TOKENIZER,
    required=True,
    type=click.Choice([*TOKENIZERS, *GPT_NEOX_NAMES]),
    help="Tokenizer type; SPMTokenizer is GPT-NeoX's name of SentencePieceTokenizer.",
)
@option(
    "--vocab-file",
    "--vocab",
    group=_TOKENIZER,
    type=click.Path(path_type=Path),
    help="The tokenizer's vocabulary, or its only file, such as tokenizer.json.",
)
@option(
    "--merge-file",
    group=_TOKENIZER,
    type=click.Path(path_type=Path),
    help="Merges file of GPT2BPETokenizer.",
)
@option(
    "--append-eod",
    group=_TOKENIZER,
    is_flag=True,
    help="Append the end-of-document token to each document, unless the tokenizer appends it itself.",
)
@option(
    "--output-prefix",
    group=_OUTPUT,
    required=True,
    help="Prefix of the output; datasets are named PREFIX_KEY_document.",
)
@option(
    "--dataset-impl",
    group=_OUTPUT,
    type=click.Choice(["mmap"]),
    default="mmap",
    expose_value=False,
    help="Output layout; neox-data convert converts existing cached or lazy datasets to it.",
)
@option(
    "--workers",
    group=_RUN,
    type=click.IntRange(1),
    help="Number of encoding threads; the output does not depend on it.  [default: all cores]",
)
@log_interval_option
@option("--skip-bad-lines", group=_CORPUS, is_flag=True, help="Skip and count documents that cannot be read.")
@option(
    "--exact",
    group=_TOKENIZER,
    is_flag=True,
    help="Encode with the tokenizers library, never with gigatoken.",
)
@option(
    "--max-document-bytes",
    group=_CORPUS,
    type=click.IntRange(1),
    default=MAX_DOCUMENT_BYTES,
    help="Maximum document size; larger documents are skipped and counted.",
)
@option(
    "--split-long-documents",
    group=_CORPUS,
    is_flag=True,
    help="Split larger documents instead of skipping them, at line ends if possible.",
)
@option("--ftfy", group=_CORPUS, is_flag=True, help="Repair wrongly decoded characters with ftfy.")
@option(
    "--resume",
    group=_OUTPUT,
    is_flag=True,
    help="Process the corpus in shards, and skip those finished by an earlier run with this flag.",
)
@option(
    "--shard",
    group=_CORPUS,
    metavar="I/N",
    help="Process only the I-th of N parts of the files, such as 2/8.",
)
@quiet_option
def main(
    inputs: tuple[str, ...],
    more: tuple[str, ...],
    keys: tuple[str, ...],
    loss_mask: str | None,
    prompt_key: str,
    response_key: str,
    messages_key: str,
    chat_template: Path | None,
    num_docs: int | None,
    tokenizer_type: str,
    vocab_file: Path | None,
    merge_file: Path | None,
    append_eod: bool,
    output_prefix: str,
    workers: int | None,
    log_interval: int,
    skip_bad_lines: bool,
    exact: bool,
    max_document_bytes: int,
    split_long_documents: bool,
    ftfy: bool,
    resume: bool,
    shard: str | None,
    quiet: bool,
) -> None:
    """Tokenize text files for training; writes PREFIX_KEY_document.bin and .idx."""
    if not output_prefix or output_prefix.endswith("/"):
        raise click.UsageError(
            f"--output-prefix {output_prefix!r} contains no file name; append a name to it"
        )
    workers = prepare_threads(workers)
    passed_over = PassedOver()
    paths, ending = take_shard(find_inputs(inputs + more, passed_over), shard)
    _refuse_unused(click.get_current_context(), loss_mask)
    template = chat_template or _folder_of(vocab_file)
    mask = _loss_mask(loss_mask, prompt_key, response_key, messages_key, template)
    options = Options(
        keys=tuple(dict.fromkeys(keys)) if mask is None else mask.written_keys,
        loss_mask=mask,
        append_end=append_eod,
        workers=workers,
        num_documents=num_docs,
        skip_bad_lines=skip_bad_lines,
        exact=exact,
        max_document_bytes=max_document_bytes,
        split_long=split_long_documents,
        mend_text=ftfy,
    )
    tokenizer = build_tokenizer(tokenizer_type, vocab_file=vocab_file, merge_file=merge_file)
    if not append_eod and (mask is not None or not tokenizer.ends_texts):
        click.echo(_NO_END_NOTE, err=True)
    if isinstance(mask, ChatMask):
        _note_on_end(mask, tokenizer)
    run = preprocess_resumably if resume else preprocess
    with report_progress(log_interval=None if quiet else log_interval) as report:
        summary = run(
            paths,
            output_prefix=output_prefix + ending,
            tokenizer=tokenizer,
            options=options,
            report=report,
            passed_over=passed_over,
        )
    for line in summary.lines():
        click.echo(line)
    if isinstance(mask, ChatMask):
        for note in mask.described_changes():
            click.echo(f"note: {note}", err=True)


def _note_on_end(mask: ChatMask, tokenizer: Tokenizer) -> None:
    """Print a note if the template ends answers with another special token than documents end with."""
    end = end_of_answer(mask.template, tokenizer)
    if end is not None and end.id != tokenizer.end_of_document:
        of_documents = EndOfAnswer(tokenizer.end_of_document, tokenizer.decode([tokenizer.end_of_document]))
        click.echo(
            f"note: the chat template ends answers with {end}, but documents end with {of_documents}; set "
            f"stop-tokens: [{end.id}] in the configuration, so that generated texts end there",
            err=True,
        )


def _folder_of(vocab_file: Path | None) -> Path | None:
    """Return the folder of a tokenizer; None for a name in the hub of models, which has no folder here."""
    if vocab_file is None or vocab_file.is_dir():
        return vocab_file
    return vocab_file.parent if vocab_file.is_file() else None


def _refuse_unused(context: click.Context, kind: str | None) -> None:
    """Refuse options that would have no effect with this kind of loss mask; None: without one."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and kind not in _USED_WITH.get(name, (kind,)):
            option = max(parameter.opts, key=len)
            where = "without --loss-mask" if kind is None else f"with --loss-mask {kind}"
            raise click.UsageError(f"{option} has no effect {where}; remove {option}, or change --loss-mask")


def _loss_mask(
    kind: str | None, prompt_key: str, response_key: str, messages_key: str, template: Path | None
) -> LossMask | None:
    """Return the loss mask that the options describe; None without --loss-mask."""
    if kind is None:
        return None
    if kind == "prompt-response":
        return PromptMask(prompt_key, response_key)
    if template is None:
        raise click.UsageError("--loss-mask chat requires --chat-template FOLDER")
    return ChatMask(messages_key, load_chat_template(template))
