"""Source of threads that run Python all the time, as loaders and loggers of a real program do."""

SOURCE = """
import threading, time
def deep(left): return 0 if left == 0 else 1 + deep(left - 1)
def work():
    while True:
        for left in range(0, 300, 7): deep(left)
        time.sleep(0.0005)
def begin():
    while True:
        thread = threading.Thread(target=deep, args=(20,))
        thread.start()
        thread.join()
for body in (work, work, work, begin): threading.Thread(target=body, daemon=True).start()
"""
