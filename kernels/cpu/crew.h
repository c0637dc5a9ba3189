// Sharing a pass's work among threads in small pieces. Knows nothing of what the pieces are.
//
// Whoever runs the pass owns the crew for that time. It opens a *job* of numbered pieces, takes pieces like everyone
// else, and goes on when all are done. Helpers on the process's own cores are its equals. Helpers on *borrowed* cores
// run only while nobody else wants those (SCHED_IDLE), and take no work before they have seen that this is so for a while.
// One that loses its core in the middle of a piece is moved to the owner's, which waits there for the rest of that piece:
// no borrowed core can hold up a pass for longer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

typedef void (*Piece)(void *body, int64_t index);

// Runs piece(body, 0..count-1), each once, on any thread of the crew; returns when all are done. In a piece, or while
// another thread has the crew, all run on the caller.
void run_pieces(int64_t count, Piece piece, void *body);

// body(i) for i of 0..count-1. `body` must not name thread_local variables: it runs on other threads.
template <typename Body>
void share(int64_t count, Body &&body) {
    using Plain = typename std::remove_reference<Body>::type;
    run_pieces(count, [](void *each, int64_t index) { (*static_cast<Plain *>(each))(index); }, &body);
}

constexpr int64_t ROWS_OF_PIECE = 16;

// body(row) for `count` cheap rows, some of them a piece.
template <typename Body>
void share_rows(int64_t count, Body &&body) {
    share((count + ROWS_OF_PIECE - 1) / ROWS_OF_PIECE, [&](int64_t piece) {
        const int64_t end = std::min(count, (piece + 1) * ROWS_OF_PIECE);
        for (int64_t row = piece * ROWS_OF_PIECE; row < end; row++) body(row);
    });
}

// While one exists helpers watch for jobs; otherwise they sleep.
struct Shift {
    Shift();
    ~Shift();
};
