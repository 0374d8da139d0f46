"""The layout of a run: devices and their ranks, the batch of a step, and lengths."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a run; what is divided among ranks or engines needs whole ones."""

    devices: int  # that train
    rank_devices: int  # of a data-parallel rank
    sampling_devices: int  # that sample, be they those that train
    engine_devices: int  # of a rollout engine
    prompts: int  # of a step
    group: int  # responses to a prompt
    mini_batch: int  # prompts of an update
    passes: int  # over the responses of a step
    max_prompt: int  # tokens of the longest prompt
    max_new: int  # tokens of the longest response

    @property
    def whole_ranks(self) -> bool:
        """Whether data-parallel ranks fill the devices."""
        return self.devices > 0 and self.rank_devices > 0 and self.devices % self.rank_devices == 0

    @property
    def whole_engines(self) -> bool:
        """Whether rollout engines fill the devices that sample."""
        sampling, size = self.sampling_devices, self.engine_devices
        return sampling > 0 and size > 0 and sampling % size == 0

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: copies of the model in training."""
        return self.devices // self.rank_devices

    @property
    def engines(self) -> int:
        """Rollout engines: copies of the model that sample."""
        return self.sampling_devices // self.engine_devices

    @property
    def responses(self) -> int:
        """Responses of a step."""
        return self.prompts * self.group

    @property
    def updates(self) -> int:
        """Updates of the weights in a step."""
        return self.prompts // max(1, self.mini_batch) * self.passes

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.max_prompt + self.max_new

    @property
    def rank_responses(self) -> int:
        """Responses of a data-parallel rank in a step."""
        return self.responses // self.ranks

    @property
    def rank_minibatch(self) -> int:
        """Responses of a data-parallel rank in an update."""
        return self.mini_batch * self.group // self.ranks
