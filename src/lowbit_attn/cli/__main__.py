"""python -m lowbit_attn.cli"""

from lowbit_attn.cli import app

app()
