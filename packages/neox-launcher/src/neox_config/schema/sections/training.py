"""Training iterations, batch sizes, random seed and evaluation."""

from typing import Literal

from neox_config.schema.parameter import Section, param

__all__ = ["TrainingSection"]


class TrainingSection(Section, resume="training"):
    """Training iterations, batch sizes, random seed and evaluation."""

    train_iters: int | None = param(
        None,
        origin="Meg",
        gt=0,
        le=1_000_000_000,
        none_means="computed from train_epochs",
        doc="Total number of training iterations (weight updates), including those before a restart. Either "
        "this or train-epochs is required.",
    )
    train_epochs: int | None = param(
        None,
        origin="ours",
        gt=0,
        le=1_000_000,
        none_means="not used: train_iters is given",
        doc="Number of passes over the training data, instead of train-iters: as many iterations as possible "
        "without reading a token more often. If more passes are set when a run resumes, sample-order "
        "gpt_neox shuffles all passes anew, and its remaining samples contain some tokens more often and "
        "others less often than that; with lazy, whose passes are shuffled one by one, the run "
        "continues as if it had been started with them. With T tokens of training documents, E passes have "
        "floor((E*T - 1) / seq-length) samples, or E * floor((T - 1) / seq-length) with sample-order lazy; "
        "train-iters is that divided by the global batch size, rounded down. It is computed when a command "
        "needs it, from the index of the data; all that follows from train-iters, such as the learning rate "
        "schedule, follows. Requires one dataset (data-path, or one train-data-paths), and a constant batch "
        "size when a run resumes.",
    )
    train_batch_size: int | None = param(
        None,
        origin="DSC",
        gt=0,
        le=1_000_000_000,
        none_means="micro-batch * accumulation * data-parallel size",
        doc="Global batch size, in samples per update over all devices.",
    )
    train_micro_batch_size_per_gpu: int | None = param(
        None,
        origin="DSC",
        gt=0,
        le=1_000_000,
        none_means="train_batch_size / (accumulation * data-parallel size)",
        doc="Micro-batch size, in samples per device and forward pass.",
    )
    gradient_accumulation_steps: int | None = param(
        None,
        origin="DSC",
        gt=0,
        le=1_000_000,
        none_means="train_batch_size / (micro-batch * data-parallel size), or 1",
        doc="Number of micro-batches whose gradients are accumulated for one update.",
    )
    loss_normalization: Literal["micro_batch", "global"] = param(
        "micro_batch",
        origin="ours",
        doc="How the loss of a run is averaged. micro_batch: mean over the unmasked tokens of each "
        "micro-batch, then mean over micro-batches, of which one without such tokens counts as 0; global: "
        "mean over all unmasked tokens of the global batch. Evaluations always report the mean over all "
        "unmasked tokens.",
    )
    seed: int = param(
        1234,
        origin="Meg",
        ge=0,
        lt=2**32,
        doc="Random seed for weight initialization, dropout and data order.",
    )
    deterministic: bool = param(
        False,
        origin="ours",
        resume="free",
        doc="Use only algorithms that give the same result in every run, so that on GPUs, too, the same "
        "run gives the same model and a resumed run equals an uninterrupted one to the last bit. "
        "Attention becomes slower; an operator without such an algorithm ends the run with an error. "
        "On CPUs training is always deterministic.",
    )
    nonfinite_patience: int = param(
        3,
        origin="ours",
        resume="free",
        gt=0,
        doc="Stop with an error after this many consecutive updates that were skipped because a loss or a "
        "gradient was not finite. In float16, they count only while the loss scale cannot be lowered.",
    )
    sdc_check_interval: int | None = param(
        None,
        origin="ours",
        resume="free",
        gt=0,
        none_means="never",
        doc="Iterations between comparisons of the weights and optimizer states that several ranks hold as "
        "copies, to detect silent data corruption, such as flipped bits; they are also compared before each "
        "save. If copies differ, the run ends with exit code 3 and names tensor, ranks and hosts. "
        "Compared are copies of data-parallel ranks (under ZeRO the weights that the model computes with); "
        "with one data-parallel rank, weights that tensor-parallel ranks do not split and, without ZeRO, "
        "tied weights of pipeline stages.",
    )
    on_spike: Literal["continue", "skip", "rollback"] | None = param(
        None,
        origin="ours",
        none_means="losses are not compared",
        doc="What to do if the loss of an iteration is a spike: above M + spike_threshold * S. M is the "
        "median of the last spike_window losses whose updates were applied; S is 1.4826 times their median "
        "absolute deviation from M (the standard deviation of a normal distribution), at least 0.001 * |M|. "
        "A few extreme losses hardly change either. continue: only report it. skip: leave out the update, "
        "decided on the device; not under ZeRO. rollback: end with exit code 4, so that a restart "
        "(max_restarts) resumes from the last checkpoint and leaves out the batch. Every spike is logged "
        "with the documents of its batch.",
    )
    spike_threshold: float = param(
        6.0,
        origin="ours",
        gt=0,
        used_when="on_spike is continue, skip or rollback",
        doc="How far above the median a loss must be to be a spike, in deviations (see on_spike).",
    )
    spike_window: int = param(
        101,
        origin="ours",
        ge=3,
        le=100_000,
        used_when="on_spike is continue, skip or rollback",
        doc="Number of losses with which a loss is compared (see on_spike). No loss is a spike before that "
        "many updates have been applied.",
    )
    spike_patience: int = param(
        5,
        origin="ours",
        resume="free",
        gt=0,
        used_when="on_spike is skip or rollback",
        doc="Stop with an error (exit code 5) at this many consecutive spikes whose updates were left out "
        "(skip), or at a spike after this many rollbacks to the same checkpoint (rollback).",
    )
    spike_rollback_batches: int = param(
        1,
        origin="ours",
        gt=0,
        le=1_000_000,
        used_when="on_spike is rollback",
        source="arXiv:2204.02311",
        doc="Number of consecutive batches that a rollback leaves out; the last one is that of the spike. "
        "Earlier updates may have caused it. Batches before the checkpoint remain trained.",
    )
    eval_iters: int = param(
        100,
        origin="Meg",
        resume="free",
        ge=0,
        le=1_000_000_000,
        doc="Number of batches in each evaluation, of train-batch-size samples like those of the run: "
        "neither iterations of the run nor documents. 0 disables evaluation. Each evaluation of the "
        "validation data reads the batches after those of the previous one, so that its losses also differ "
        "by these; eval_data is the same in each.",
    )
    eval_interval: int = param(
        1000, origin="Meg", resume="free", gt=0, doc="Iterations of the run between evaluations."
    )
    planned_seconds: float | None = param(
        None,
        origin="ours",
        resume="free",
        gt=0,
        none_means="no time was planned",
        doc="Time that train-iters was chosen for, as neox-launch init --time writes it. It ends nothing: if "
        "a run from new weights leaves more than a fifth of it, the launcher prints the command that "
        "trains for the rest.",
    )
    exit_interval: int | None = param(
        None,
        origin="Meg",
        resume="free",
        gt=0,
        none_means="train to the end",
        doc="Save and exit at the first iteration divisible by this, after an evaluation that is due at it.",
    )
    adlr_autoresume: bool = param(
        False,
        origin="Meg",
        resume="free",
        doc="Ask a service of the cluster, such as NVIDIA's ADLR autoresume, whether the job must end. If "
        "so, the run saves a checkpoint, requests that the job is started again, and ends with exit "
        "code 0.",
    )
    adlr_autoresume_interval: int = param(
        1000,
        origin="Meg",
        resume="free",
        gt=0,
        used_when="adlr_autoresume is true",
        doc="Iterations between queries to the autoresume service.",
    )
    adlr_autoresume_service: str = param(
        "userlib.auto_resume:AutoResume",
        origin="ours",
        resume="free",
        used_when="adlr_autoresume is true",
        doc="The autoresume service, as MODULE:OBJECT of an importable module. The object has the methods "
        "init(), called by every rank at the start; termination_requested(), which returns true if the job "
        "must end, called by every rank; and request_resume(), called by rank 0 after the checkpoint is "
        "complete.",
    )

    @property
    def iterations(self) -> int:
        """Return train_iters, which `neox_launcher.plan.epochs` computes where train_epochs is given.

        Raises:
            ValueError: it was not computed.
        """
        if self.train_iters is None:
            raise ValueError("train-iters was not computed from train-epochs; see neox_launcher.plan.epochs")
        return self.train_iters
