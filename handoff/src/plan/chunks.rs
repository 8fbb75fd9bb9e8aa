//! Chunks of pages: the pages that prefill may send while it still computes the request (row S6).

use std::ops::Range;

/// Pages that are sent together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageChunk {
    /// The pages of the request, counted from its first token.
    pub pages: Range<u32>,
    /// Whether the chunk is the last. The metadata and the states go with the last chunk.
    pub is_last: bool,
}

/// Cuts the tokens of one request into chunks of pages. Every chunk but the last ends at a page border. The
/// last chunk carries the remainder.
#[derive(Clone, Debug)]
pub struct PageChunker {
    page_tokens: u32,
    sent: u32,
    is_done: bool,
}

impl PageChunker {
    /// Starts after the `held` pages that the receiver has already. `None` for a page size of 0 tokens.
    pub fn new(page_tokens: u32, held: u32) -> Option<Self> {
        (page_tokens > 0).then_some(Self {
            page_tokens,
            sent: held,
            is_done: false,
        })
    }

    /// The chunk that is complete once `tokens` tokens of the request are computed; `None` when no further page
    /// is. The last chunk comes exactly once, and may have no pages.
    pub fn next(&mut self, tokens: u32, is_last: bool) -> Option<PageChunk> {
        if self.is_done {
            return None;
        }
        let end = match is_last {
            true => tokens.div_ceil(self.page_tokens),
            false => tokens / self.page_tokens,
        };
        let pages = self.sent..end.max(self.sent);
        if pages.is_empty() && !is_last {
            return None;
        }
        self.sent = pages.end;
        self.is_done = is_last;
        Some(PageChunk { pages, is_last })
    }
}
