"""A script with transformers' Trainer, unaware of haiscale: torchrun --nproc-per-node 2 trainer.py [cuda]."""

import json
import sys
import tempfile

import torch
import transformers


def main():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 16))]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=sys.argv[1:] != ["cuda"],
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])
        trainer.train()
        logs = [log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history]
    if trainer.is_world_process_zero():
        print(json.dumps([loss for loss in logs if loss is not None]))


if __name__ == "__main__":
    main()
