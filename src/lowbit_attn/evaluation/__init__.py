"""lm-eval over low-bit caches: the model type ``lowbit`` (``model``) and tasks that need no network (``tasks``).

Needs the extra ``eval``; importing a module of this folder without it raises ImportError.
"""

from lowbit_attn import extras

REMEDY = extras.remedy("eval")
