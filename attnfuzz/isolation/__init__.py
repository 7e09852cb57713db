"""Running code that may crash, hang or eat memory in processes of its own.

A zygote (`zygote_client`) imports what is slow to import; each `executor` is forked from it in milliseconds, answers
calls to a service, and takes nothing with it when it dies.
"""
