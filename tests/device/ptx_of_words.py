"""Compile every case's kernel to PTX for sm_90 without a GPU and print {word: ptx} as JSON. Run in a process of its own."""
import json
import re
import sys


def main():
    from word_cases import CASES
    texts = {}
    for case in CASES.values():
        if case.kernel not in texts:
            texts[case.kernel] = case.kernel.ptx()
    json.dump({name: re.sub(r"^.*\.(visible|extern) \.(entry|func)[^{]*", r"\g<0>", texts[case.kernel]) for name, case in CASES.items()},
              sys.stdout)


if __name__ == "__main__":
    main()
