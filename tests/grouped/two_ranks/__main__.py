"""One of the two processes that ``runner.launch`` starts."""

from .runner import main

main()
