"""The words of the page: what it says before and beside the pictures, for somebody who has never seen any of this."""

from typing import NamedTuple


class Chapter(NamedTuple):
    """One section: its heading, its paragraphs, and the lines of its legend."""

    title: str
    text: tuple
    legend: tuple = ()


BEGINNING = (
    "A Mixture-of-Experts layer sends each token to a few small networks, the experts. The experts live on several "
    "GPUs, called ranks, so tokens travel: <b>dispatch</b> brings them to their experts, <b>combine</b> brings the "
    "results back and sums them up. This page shows one round of both, recorded while the kernels ran in a simulator.")

CHAPTERS = {
    "routing": Chapter(
        "1. Who sends what to whom",
        ("A small network, the router, has chosen the experts of each token. Each line is one message: the "
         "token must get to the rank that owns the expert. Nobody knows beforehand how many will come.",),
        ("a line has the colour of the token's rank; a short line that ends in -1 is a slot without an expert",)),
    "buffers": Chapter(
        "2. Messages arrive",
        ("Each rank has a buffer, recv_buf, with places for every (local expert, source rank, slot). A sender claims "
         "the next free slot by counting up, and writes its message straight into the other rank's memory.",
         "In recv_count it announces how many messages will come, and when all of them are written it puts the number "
         "itself there: the signal. Only then may the receiver look at them.")),
    "rows": Chapter(
        "3. Rows grouped by expert",
        ("From the announced numbers each rank knows how many rows each of its experts gets: row_offsets are running "
         "sums. Messages are copied into rows, so that each expert finds its rows in one piece: one matrix product.",
         "src_info remembers for each row which token and slot it came from. The order inside one (expert, source "
         "rank) group is the order of the claims, so it may differ from run to run."),
        ("a coloured row is a copied message, a very pale one is not there yet; the number to the left of a bracket is "
         "row_offsets, where the expert's rows begin; the last one is the number of rows",)),
    "counters": Chapter(
        "4. The counters through which everybody waits",
        ("No host takes part: blocks of one GPU, and GPUs among each other, wait only by looking at words in memory. "
         "These are all of them, on each rank.",
         "Step through the round and watch: places are claimed, messages counted, signals arrive, rows get their "
         "places, and at the end the counters are ready for the next round (B is written anew before it is read)."),
        ("highlighted: changed at this moment; of recv_count, – is \"not arrived\" and 2… announces two messages",
         "a table has a line for each local expert and a column for each rank; in A, \"end\" is 1024 + the row "
         "behind the rank's rows, and \"n\" their number")),
    "timeline": Chapter(
        "5. When each block did what",
        ("A kernel runs as several blocks at once. Each lane is a block; where it waits, its lane is empty with a "
         "dotted edge. An arrow leads from a release (\"what I wrote before is ready\") to the acquire that saw it "
         "(\"now I may read it\").",
         "Without such an arrow nothing says that one block's writes are visible to another. The vertical line is the "
         "moment chosen here and in the counters above; arrows and marks of that moment stand out.")),
    "combine": Chapter(
        "6. The way back",
        ("Each expert has turned its rows into results. They return to the rank they came from, into the place (token, "
         "k), and are signalled as before. Then each token's rows are multiplied by the router's weights and summed "
         "up, in the order of k.",
         "The numbers are the first ones of each row, as they lie in memory."),
        ("a line has the colour of the token's rank, and is as thick as its weight is large; what is very pale has not "
         "come yet",)),
}


def glossary(cfg):
    """(word, what it means) of the words that the first picture needs."""
    return [("rank", "one GPU; it owns some experts and has some tokens of its own"),
            ("token", f"a row of {cfg.hidden} numbers; t0 is the first token of its rank"),
            ("expert", f"a small network; rank 0 owns the first {cfg.n_local_experts}, from e0 on, rank 1 the next, "
             "and so on. On its own rank an expert is called by its local_expert number, from 0"),
            ("slot k", f"a token chooses {cfg.top_k} experts; k counts them, and each has a weight. -1 is an empty "
             "slot")]
