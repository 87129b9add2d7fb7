"""The training objective: which tokens the model predicts, and from which others."""

from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["ObjectiveSection"]

_MASKED = "objective is masked"
_ICT = "objective is ict"
_FIM = "fim_rate is not 0"
_FIM_TOKEN = (
    "Text of the special token before the {} of a rearranged document; the vocabulary must contain it."
)


class ObjectiveSection(Section, resume="training"):
    """What the model learns: to predict the next token or masked tokens, or to find blocks of text."""

    mask_prob: float = param(
        0.15,
        origin="Meg",
        gt=0,
        le=1,
        used_when=_MASKED,
        doc="Share of the tokens of a sample that are predicted. Of these, 80 % are replaced by the mask "
        "token, 10 % by a random token, and 10 % stay. End-of-document and other special tokens are never "
        "chosen.",
    )
    mask_whole_words: bool = param(
        False,
        origin="ours",
        used_when=_MASKED,
        doc="Choose whole words: successive tokens with letters, digits or underscores at their borders.",
    )
    mask_token: str | None = param(
        None,
        origin="ours",
        min_length=1,
        none_means="<|mask|>, [MASK] or <mask>, the first that the vocabulary contains",
        used_when=_MASKED,
        doc="Text of the mask token. neox-data add-tokens adds one to a vocabulary.",
    )
    short_seq_prob: float = param(
        0.1,
        origin="Meg",
        ge=0,
        le=1,
        used_when=_MASKED,
        doc="Probability that a sample is cut to a random length of at least 2 tokens, so that the model "
        "also learns short texts. The rest is padding, which is not predicted and not seen.",
    )
    fim_rate: float = param(
        0.0,
        origin="ours",
        ge=0,
        le=1,
        used_when="objective is causal",
        source="arXiv:2207.14255",
        doc="Fill in the middle: probability that a document of a training sample is rearranged, so that the "
        "model learns to fill a gap: prefix, suffix, then middle, with a special token before each. Samples "
        "keep their length; documents are separated by end-of-document tokens. Validation and test samples "
        "are not changed.",
    )
    fim_spm_rate: float = param(
        0.5,
        origin="ours",
        ge=0,
        le=1,
        used_when=_FIM,
        source="arXiv:2207.14255",
        doc="Probability that the order of a rearranged document is suffix, prefix, middle (SPM).",
    )
    fim_prefix_token: str = param(
        "<|fim_prefix|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("prefix")
    )
    fim_middle_token: str = param(
        "<|fim_middle|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("middle")
    )
    fim_suffix_token: str = param(
        "<|fim_suffix|>", origin="ours", min_length=1, used_when=_FIM, doc=_FIM_TOKEN.format("suffix")
    )
    z_loss: float = param(
        0.0,
        origin="ours",
        ge=0,
        le=1_000,
        used_when="objective is not ict",
        source="arXiv:2204.02311, section 5",
        doc="Coefficient of a term of the training loss: the square of the logarithm of the softmax's "
        "denominator of each token. It keeps logits from drifting; 1e-4 is usual. Logged as loss/z_loss; the "
        "logged training and validation losses do not contain it. In GPT-NeoX, this name has an effect only "
        "in the training of reward models.",
    )
    ict_head_size: int | None = param(
        None,
        origin="Meg",
        gt=0,
        resume="model",
        none_means="required if objective is ict",
        used_when=_ICT,
        doc="Width of the embeddings of queries and blocks, which the towers project the first token to.",
    )
    ict_shared_towers: bool = param(
        False,
        origin="ours",
        resume="model",
        used_when=_ICT,
        doc="Embed queries and blocks with the same tower. false: with two separate towers.",
    )
    bert_load: PathText | None = param(
        None,
        origin="Meg",
        none_means="newly initialized towers",
        used_when=_ICT,
        doc="Folder of the checkpoints of a masked model of the same size (objective: masked), with whose "
        "weights each tower starts. A run that continues from a checkpoint does not read it.",
    )
    query_in_block_prob: float = param(
        0.1,
        origin="Meg",
        ge=0,
        le=1,
        used_when=_ICT,
        doc="Probability that the sentence that is the query stays in its block.",
    )
    use_one_sent_docs: bool = param(
        False,
        origin="Meg",
        used_when=_ICT,
        doc="Also use blocks of a single sentence, which then stays in its block.",
    )
    titles_data_path: PathText | None = param(
        None,
        origin="Meg",
        none_means="blocks without titles",
        used_when=_ICT,
        doc="Prefix of a dataset with the title of every document of the data, in the same order; a block "
        "begins with the title of its document.",
    )
    report_topk_accuracies: tuple[int, ...] = param(
        (),
        origin="Meg",
        resume="free",
        used_when=_ICT,
        doc="Report, in evaluations, the share of queries whose block is among the best k blocks of the "
        "micro-batch of all data-parallel ranks, for each k of this list.",
    )
    ict_load: PathText | None = param(
        None,
        origin="Meg",
        resume="free",
        none_means="the value of load",
        used_when=_ICT,
        doc="Folder of the checkpoints of the retrieval model with which neox-launch index-blocks and "
        "find-blocks embed texts.",
    )
    block_data_path: PathText | None = param(
        None,
        origin="Meg",
        resume="free",
        none_means="required by index-blocks and find-blocks",
        used_when=_ICT,
        doc="Folder of the index of blocks: neox-launch index-blocks writes the embeddings of all blocks of "
        "the data to it, and find-blocks reads them.",
    )
    indexer_batch_size: int = param(
        128,
        origin="Meg",
        gt=0,
        resume="free",
        used_when=_ICT,
        doc="Blocks that a process embeds at a time.",
    )
    indexer_log_interval: int = param(
        1000,
        origin="Meg",
        gt=0,
        resume="free",
        used_when=_ICT,
        doc="Batches between two progress reports of neox-launch index-blocks.",
    )
    block_query: str | None = param(
        None,
        origin="ours",
        min_length=1,
        resume="free",
        none_means="sentences of the test documents, or of those for validation, to report how many "
        "find their block",
        used_when=_ICT,
        doc="Text for which neox-launch find-blocks returns the best blocks. Same as find-blocks --query "
        "TEXT.",
    )
    block_count: int = param(
        5,
        origin="ours",
        gt=0,
        resume="free",
        used_when=_ICT,
        doc="Number of blocks that neox-launch find-blocks returns. Same as find-blocks --count N.",
    )
    faiss_use_gpu: bool = param(
        False,
        origin="Meg",
        resume="free",
        used_when=_ICT,
        doc="Not used: the search is exact and runs on the GPU if there is one, without FAISS.",
    )
