//! Chunks of pages: what may be sent while prefill still computes (row S6).

use std::ops::Range;

/// Pages that are sent together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageChunk {
    /// The pages of the request, counted from its first token.
    pub pages: Range<u32>,
    /// Whether metadata and states go with the chunk, because it is the last.
    pub is_last: bool,
}

/// Cuts the tokens of one request into chunks of pages. Every chunk but the last ends at the border
/// of a page. The last one carries the remainder.
#[derive(Clone, Debug)]
pub struct PageChunker {
    page_tokens: u32,
    sent: u32,
    is_done: bool,
}

impl PageChunker {
    /// Starts after the `held` pages that the receiver has already. `None` for pages of no tokens.
    pub fn new(page_tokens: u32, held: u32) -> Option<Self> {
        (page_tokens > 0).then_some(Self {
            page_tokens,
            sent: held,
            is_done: false,
        })
    }

    /// The chunk that is complete once `tokens` tokens of the request are computed; `None` when no
    /// further page is. The last chunk may have no pages, and comes exactly once.
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
