/* Reads one golden vector, DIR/NAME.json and DIR/NAME.bin, with nothing but C: checks every array's CRC-32 and, for
 * dispatch in bf16, that every row is the token its src_info names, at the expert that the token chose. Nothing in the
 * files is trusted: a number that points outside of an array ends the program with 1 and a message.
 * cc -o read_vector read_vector.c && ./read_vector DIR/NAME */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { uint8_t *data; long nbytes, rows, columns; } Array;
enum { TOKENS, IDS, ROWS, OFFSETS, INFO, COUNT, N_NAMES, MAX_RANKS = 64 };
static const char *NAMES[] = {"input_tokens", "topk_ids", "output_tokens", "row_offsets", "src_info", "recv_count"};
static const long ELEMENT_BYTES[] = {2, 4, 2, 4, 4, 4};
static Array arrays[N_NAMES][MAX_RANKS];
static uint8_t blob[(1 << 24) + 1];

static void require(int holds, const char *what) {
    if (!holds) { fprintf(stderr, "read_vector: %s\n", what); exit(1); }
}
static long number(const char *line, const char *key, long least, long most) {      /* what follows the key */
    const char *at = strstr(line, key);
    char *end = NULL;
    long long value = at ? (errno = 0, strtoll(at + strlen(key), &end, 10)) : 0;
    require(at && end != at + strlen(key) && !errno, "a manifest line lacks a number");
    require(least <= value && value <= most, "a number of the manifest is outside its bounds");
    return (long)value;
}
static int32_t i32(Array a, long i) {                             /* little-endian on any machine */
    require(0 <= i && i < a.nbytes / 4, "an index is outside its array");
    const uint8_t *p = a.data + 4 * i;
    return (int32_t)(p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
}
static uint8_t *row_of(Array a, long row) {                       /* of bf16 numbers */
    require(0 <= row && row < a.rows, "a row is outside its array");
    return a.data + 2 * row * a.columns;
}
static uint32_t crc32(const uint8_t *p, long n) {
    uint32_t c = ~0u;
    while (n--) { c ^= *p++; for (int b = 0; b < 8; b++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0); }
    return ~c;
}
static void keep(int name, long rank, Array a, const char *line) {
    const char *shape = strstr(line, "\"shape\": ["), *comma = shape ? strpbrk(shape, ",]") : NULL;
    require(rank >= 0 && comma, "an array of a rank has no rank, or no shape");
    a.rows = number(shape, "[", 0, a.nbytes);
    a.columns = *comma == ',' ? number(comma, ",", 0, 1 << 24) : 1;               /* of no bytes if there are no rows */
    require(!a.columns || a.rows <= a.nbytes / a.columns, "a shape does not fit its bytes");
    require(a.rows * a.columns * ELEMENT_BYTES[name] == a.nbytes, "a shape does not fit its bytes");
    arrays[name][rank] = a;
}
static long rows_of_dispatch(long n_ranks) {                      /* how many, all of them checked */
    long rows = 0, pairs = 0, n = arrays[COUNT][0].rows;
    for (long rank = 0; rank < n_ranks; rank++) {
        for (int i = 0; i < N_NAMES; i++) require(arrays[i][rank].data != NULL, "a rank lacks an array");
        require(arrays[COUNT][rank].rows == n && arrays[COUNT][rank].columns == n_ranks
                && arrays[OFFSETS][rank].rows == n + 1 && arrays[INFO][rank].columns == 2
                && arrays[ROWS][rank].columns == arrays[TOKENS][0].columns
                && arrays[TOKENS][rank].columns == arrays[TOKENS][0].columns
                && arrays[IDS][rank].rows == arrays[TOKENS][rank].rows, "shapes do not fit each other");
        for (long i = 0; i < arrays[IDS][rank].nbytes / 4; i++) pairs += i32(arrays[IDS][rank], i) >= 0;
    }
    for (long rank = 0; rank < n_ranks; rank++) for (long le = 0; le < n; le++)
        for (long src = 0, row = i32(arrays[OFFSETS][rank], le); src < n_ranks; src++)
            for (long end = row + i32(arrays[COUNT][rank], le * n_ranks + src); row < end; row++, rows++) {
                Array info = arrays[INFO][rank], ids = arrays[IDS][src], tokens = arrays[TOKENS][src];
                require(0 <= row && row < info.rows, "a row is outside its array");
                long t = i32(info, 2 * row), k = i32(info, 2 * row + 1), pair = t * ids.columns + k;
                require(0 <= t && t < ids.rows && 0 <= k && k < ids.columns, "src_info names no token, or no slot");
                require(i32(ids, pair) == rank * n + le, "src_info names a slot of another expert, or one twice");
                require(!memcmp(row_of(arrays[ROWS][rank], row), row_of(tokens, t), 2 * tokens.columns), "a wrong row");
                memset(ids.data + 4 * pair, 0xff, 4);             /* -1: each pair has one row */
            }
    require(rows == pairs, "not every (token, slot) pair has its row");
    return rows;
}
int main(int argc, char **argv) {
    static char path[4096], line[4096], name[64];
    long n_ranks = 0, n_arrays = 0, plain = 0;
    require(argc == 2 && strlen(argv[1]) < sizeof path - 8, "usage: read_vector DIR/NAME");
    FILE *bin = fopen((sprintf(path, "%s.bin", argv[1]), path), "rb");
    FILE *json = fopen((sprintf(path, "%s.json", argv[1]), path), "r");
    require(bin && json, "usage: read_vector DIR/NAME, where NAME.json and NAME.bin lie");
    long size = (long)fread(blob, 1, sizeof blob, bin);
    require(size < (long)sizeof blob, "NAME.bin is larger than 16 MiB");
    while (fgets(line, sizeof line, json)) {                      /* one array a line */
        require(strchr(line, '\n') || feof(json), "a line of the manifest is too long");
        plain |= strstr(line, "format\": \"bf16\"") && !strstr(line, "expert\": true") && !strstr(line, "a2a\": true");
        if (sscanf(line, " {\"name\": \"%63[^\"]", name) != 1) continue;
        long rank = number(line, "\"rank\": ", -1, MAX_RANKS - 1), offset = number(line, "\"offset\": ", 0, size);
        Array a = {blob + offset, number(line, "\"nbytes\": ", 0, size - offset), 0, 0};
        require(crc32(a.data, a.nbytes) == (uint32_t)number(line, "\"crc32\": ", 0, UINT32_MAX), "a CRC-32 is wrong");
        for (int i = 0; plain && i < N_NAMES; i++) if (!strcmp(name, NAMES[i])) keep(i, rank, a, line);
        n_arrays++, n_ranks = rank >= n_ranks ? rank + 1 : n_ranks;
    }
    require(n_arrays, "the manifest has no array");
    printf("ok: %ld arrays, %ld rows of dispatch\n", n_arrays, plain ? rows_of_dispatch(n_ranks) : 0);
}
