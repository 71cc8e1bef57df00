"""Tasks for lm-eval that need no network: ``lowbit_recall``, key-value recall by greedy writing.

The prompts are those of ``lowbit_attn.recall``: a list of "word: digits" lines inside prose, and at the end the
question for one of the words. Small models can do it, and a cache that loses tokens cannot.
"""

from lowbit_attn.codebooks.text import help_text
from lowbit_attn.evaluation import REMEDY
from lowbit_attn.recall import DIGITS, contexts, question

try:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
except ImportError as error:
    raise ImportError(f"lm-eval is not installed ({error}): {REMEDY}") from error

RECALL, QUESTIONS, VERSION = "lowbit_recall", 160, 1


def recall_task(questions: int = QUESTIONS, prose: str | None = None) -> ConfigurableTask:
    """The task with so many questions to ten a prompt; prose: what the prompts are cut from, None: help topics.

    Its metric is exact_match: the code, all digits of it and nothing else, is what the model writes on the line.
    """
    def documents(**kwargs) -> dict[str, Dataset]:
        made = contexts(help_text(None) if prose is None else prose, questions)
        return {"test": Dataset.from_list([{"prompt": context.text + question(word), "code": code}
                                           for context in made for word, code in context.codes.items()])}

    return ConfigurableTask(config={
        "task": RECALL, "custom_dataset": documents, "test_split": "test", "output_type": "generate_until",
        "doc_to_text": lambda doc: doc["prompt"], "doc_to_target": lambda doc: doc["code"],
        "process_results": lambda doc, results: {"exact_match": float(results[0].strip() == doc["code"])},
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 4 * DIGITS},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "num_fewshot": 0, "metadata": {"version": VERSION}})


TASKS = {RECALL: recall_task}
