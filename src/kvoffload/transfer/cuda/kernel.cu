/* Gathers device blocks into consecutive rows, and scatters rows into device blocks.

   `nvcc -ptx -arch=compute_75 -o kernel.ptx kernel.cu` makes kernel.ptx, whose `.version` is lowered by hand: drivers
   from R525 on compile it for their device. */

#define MAX_BLOCKS 960   /* The parameters of a launch have at most 4,096 bytes. */
#define AT_ONCE 8        /* How many words a thread reads before it writes. */
#define WARP 32

/* Bytes that each device block has in one piece: block i has `nbytes` of them at base + i * stride, and its row has them
   at `offset`. All fields are multiples of the size of a word. */
struct Piece {
    long long base, stride, nbytes, offset;
};

/* Block i of the launch belongs to row i. */
struct Blocks {
    int numbers[MAX_BLOCKS];
};

/* Copies the pieces of all rows. Each warp takes one piece of one row at a time. */
#define KERNEL(NAME, WORD, GATHERS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        NAME(const Piece *pieces, unsigned long long staging, unsigned long long row_bytes, unsigned num_pieces,       \
             unsigned num_rows, const __grid_constant__ Blocks blocks) {                                               \
        unsigned lane = threadIdx.x % WARP, warps = gridDim.x * blockDim.x / WARP;                                     \
        for (unsigned task = (blockIdx.x * blockDim.x + threadIdx.x) / WARP; task < num_rows * num_pieces;             \
             task += warps) {                                                                                          \
            unsigned row = task / num_pieces;                                                                          \
            Piece piece = pieces[task - row * num_pieces];                                                             \
            WORD *page = (WORD *)(piece.base + blocks.numbers[row] * piece.stride);                                    \
            WORD *place = (WORD *)(staging + row * row_bytes + piece.offset);                                          \
            const WORD *from = GATHERS ? page : place;                                                                 \
            WORD *to = GATHERS ? place : page;                                                                         \
            unsigned count = (unsigned long long)piece.nbytes / sizeof(WORD), at = lane;                               \
            _Pragma("unroll 1") for (; at < count; at += AT_ONCE * WARP) {                                             \
                WORD words[AT_ONCE];                                                                                   \
                _Pragma("unroll") for (int i = 0; i < AT_ONCE; i++)                                                    \
                    if (at + i * WARP < count) words[i] = from[at + i * WARP];                                         \
                _Pragma("unroll") for (int i = 0; i < AT_ONCE; i++)                                                    \
                    if (at + i * WARP < count) to[at + i * WARP] = words[i];                                           \
            }                                                                                                          \
        }                                                                                                              \
    }

KERNEL(gather16, uint4, true)
KERNEL(gather4, unsigned, true)
KERNEL(gather1, unsigned char, true)
KERNEL(scatter16, uint4, false)
KERNEL(scatter4, unsigned, false)
KERNEL(scatter1, unsigned char, false)
