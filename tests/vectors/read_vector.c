/* Reads one golden vector, DIR/NAME.json and DIR/NAME.bin, with nothing but C: checks every array's CRC-32 and, for
 * dispatch in bf16, that every row is the token its src_info names, at the expert that the token chose.
 * cc -o read_vector read_vector.c && ./read_vector DIR/NAME */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { const uint8_t *data; long nbytes, shape[2]; } Array;
enum { TOKENS, IDS, ROWS, OFFSETS, INFO, COUNT, N_NAMES, MAX_RANKS = 64 };
static const char *NAMES[] = {"input_tokens", "topk_ids", "output_tokens", "row_offsets", "src_info", "recv_count"};
static Array arrays[N_NAMES][MAX_RANKS];

static void require(int holds, const char *what) {
    if (!holds) { fprintf(stderr, "read_vector: %s\n", what); exit(1); }
}
static long number(const char *line, const char *key) {           /* what follows the key on a manifest line */
    const char *at = strstr(line, key);
    return at ? strtol(at + strlen(key), NULL, 10) : -1;
}
static int32_t i32(Array a, long i) {                             /* little-endian on any machine */
    const uint8_t *p = a.data + 4 * i;
    return (int32_t)(p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
}
static uint32_t crc32(const uint8_t *p, long n) {
    uint32_t c = ~0u;
    while (n--) { c ^= *p++; for (int b = 0; b < 8; b++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0); }
    return ~c;
}
int main(int argc, char **argv) {
    static char path[4096], line[4096], name[64];
    static uint8_t blob[1 << 24];
    long n_ranks = 0, rows = 0, pairs = 0, n_arrays = 0, plain = 0;
    FILE *bin = fopen((snprintf(path, sizeof path, "%s.bin", argc == 2 ? argv[1] : ""), path), "rb");
    FILE *json = fopen((snprintf(path, sizeof path, "%s.json", argc == 2 ? argv[1] : ""), path), "r");
    require(bin && json, "usage: read_vector DIR/NAME, where NAME.json and NAME.bin lie");
    long size = (long)fread(blob, 1, sizeof blob, bin);
    while (fgets(line, sizeof line, json)) {                      /* one array a line */
        plain |= strstr(line, "format\": \"bf16\"") && !strstr(line, "expert\": true") && !strstr(line, "a2a\": true");
        if (sscanf(line, " {\"name\": \"%63[^\"]", name) != 1) continue;
        long rank = number(line, "\"rank\": "), offset = number(line, "\"offset\": ");
        char *shape = strstr(line, "\"shape\": [") + 10;
        Array a = {blob + offset, number(line, "\"nbytes\": "), {strtol(shape, &shape, 10), strtol(shape + 1, 0, 10)}};
        require(offset + a.nbytes <= size && rank < MAX_RANKS, "an array lies outside the file");
        require(crc32(a.data, a.nbytes) == (uint32_t)number(line, "\"crc32\": "), "an array's CRC-32 is wrong");
        for (int i = 0; i < N_NAMES; i++) if (!strcmp(name, NAMES[i])) arrays[i][rank] = a;
        for (long i = 0; !strcmp(name, "topk_ids") && i < a.nbytes / 4; i++) pairs += i32(a, i) >= 0;
        n_arrays++, n_ranks = rank >= n_ranks ? rank + 1 : n_ranks;
    }
    for (long rank = 0; plain && rank < n_ranks; rank++)
        for (long le = 0, n = arrays[COUNT][rank].shape[0]; le < n; le++)
        for (long src = 0, row = i32(arrays[OFFSETS][rank], le); src < n_ranks; src++)
            for (long end = row + i32(arrays[COUNT][rank], le * n_ranks + src); row < end; row++, rows++) {
                Array info = arrays[INFO][rank], ids = arrays[IDS][src], tokens = arrays[TOKENS][src];
                long t = i32(info, 2 * row), k = i32(info, 2 * row + 1), bytes = 2 * tokens.shape[1];
                require(i32(ids, t * ids.shape[1] + k) == rank * n + le, "src_info names a slot of another expert");
                require(!memcmp(arrays[ROWS][rank].data + row * bytes, tokens.data + t * bytes, bytes), "a wrong row");
            }
    require(n_arrays && (!plain || rows == pairs), "not every (token, slot) pair has its row");
    printf("ok: %ld arrays, %ld rows of dispatch\n", n_arrays, rows);
}
