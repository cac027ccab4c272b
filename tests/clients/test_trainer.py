"""transformers' Trainer: training, evaluation, two ranks, and its checkpoints in mid-epoch."""

from __future__ import annotations

from tests.clients import contract

SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments

from tests.clients.in_rank import FOLDER, NUM_WORKERS, Model, Rows, num_epochs, record


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, image, labels):
        scores = self.model(image)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


what, state = (sys.argv[1:] + ["train", None])[:2]
arguments = TrainingArguments(
    output_dir=state or str(FOLDER / "state"),
    use_cpu=True,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    num_train_epochs=num_epochs(2),
    dataloader_num_workers=NUM_WORKERS,
    remove_unused_columns=False,
    save_strategy="steps" if what == "stop" else "no",
    save_steps=4,
    max_steps=4 if what == "stop" else -1,
    seed=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=Classifier(), args=arguments, train_dataset=Rows(), eval_dataset=Rows(7))
record("number of batches", len(trainer.get_train_dataloader()))
trainer.train(resume_from_checkpoint=f"{state}/checkpoint-4" if what == "resume" else None)
if what == "train":
    trainer.evaluate()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


class TestTrainer(contract.Batches, contract.Ranks, contract.Resume):
    script = SCRIPT
    ways = ("patch_torch",)
