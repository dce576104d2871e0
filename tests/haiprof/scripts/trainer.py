"""A training script with transformers' Trainer, unaware of haiprof: python trainer.py [steps]."""

import sys
import tempfile

import torch
import transformers


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=512, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(512, (512, 64))]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=max(1, steps // 2),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=10,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:16])
        trainer.train()


if __name__ == "__main__":
    main()
