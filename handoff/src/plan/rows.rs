//! Pages as rows of bytes, merged where both sides allow it (row G20).

use super::{PlanError, RankSlice, StateShape};

/// A page of the source and the page of the target that takes its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagePair {
    /// The page of the source.
    pub source: u32,
    /// The page of the target.
    pub target: u32,
}

/// `count` runs of `length` bytes. Offsets are within the regions of source and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedRow {
    /// The offset of the first run at the source.
    pub source: u64,
    /// The offset of the first run at the target.
    pub target: u64,
    /// The distance in bytes between the starts of two runs at the source. Equal to `length` when `count` is 1.
    pub source_stride: u64,
    /// The distance in bytes between the starts of two runs at the target. Equal to `length` when `count` is 1.
    pub target_stride: u64,
    /// The number of runs.
    pub count: u64,
    /// The bytes of one run.
    pub length: u64,
}

impl StridedRow {
    /// Whether the runs are one contiguous range on both sides.
    pub const fn is_contiguous(&self) -> bool {
        self.source_stride == self.length && self.target_stride == self.length
    }

    /// The number of bytes of all runs.
    pub const fn bytes(&self) -> u64 {
        self.count * self.length
    }

    /// The offsets of each run at source and target.
    pub fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |run| {
            let source = self.source + run * self.source_stride;
            (source, self.target + run * self.target_stride)
        })
    }

    fn normal(mut self) -> Self {
        if self.is_contiguous() {
            self.length *= self.count;
            self.count = 1;
        }
        if self.count == 1 {
            self.source_stride = self.length;
            self.target_stride = self.length;
        }
        self
    }

    /// Appends the row that follows. Returns false, and changes nothing, when the two rows are no single row.
    fn merge(&mut self, next: &Self) -> bool {
        if self.is_contiguous() && next.is_contiguous() {
            let follows = self.source + self.length == next.source
                && self.target + self.length == next.target;
            if follows {
                self.length += next.length;
                *self = self.normal();
            }
            return follows;
        }
        let is_alike = self.length == next.length
            && self.source_stride == next.source_stride
            && self.target_stride == next.target_stride;
        let follows = is_alike
            && self.source + self.count * self.source_stride == next.source
            && self.target + self.count * self.target_stride == next.target;
        if follows {
            self.count += next.count;
        }
        follows
    }
}

/// The rows of `parts` parts of the given pages on one rank, in the order of the pages. The region
/// holds `region_pages` pages, and the rank is one of `ranks`. Both offsets of a row are equal.
///
/// # Errors
///
/// As [`rows`].
pub fn side_rows(
    shape: &StateShape,
    (first_part, parts): (u64, u64),
    ranks: u32,
    pages: &[u32],
    region_pages: u32,
) -> Result<Vec<StridedRow>, PlanError> {
    let slice = RankSlice {
        source: 0,
        target: 0,
        source_part: first_part,
        target_part: first_part,
        parts,
    };
    let pair = |page: &u32| PagePair {
        source: *page,
        target: *page,
    };
    let pairs: Vec<PagePair> = pages.iter().map(pair).collect();
    rows(
        shape,
        &slice,
        (ranks, ranks),
        &pairs,
        (region_pages, region_pages),
    )
}

/// The rows that move one slice of the given pages, in the order of the pages. The regions hold
/// `source_pages` and `target_pages` pages.
///
/// # Errors
///
/// [`PlanError::NoSuchPage`], [`PlanError::UnevenParts`], [`PlanError::Unfit`].
pub fn rows(
    shape: &StateShape,
    slice: &RankSlice,
    (sources, targets): (u32, u32),
    pages: &[PagePair],
    (source_pages, target_pages): (u32, u32),
) -> Result<Vec<StridedRow>, PlanError> {
    let stride = |ranks| Ok(shape.parts_of(ranks)? * shape.part_bytes);
    let (source_stride, target_stride): (u64, u64) = (stride(sources)?, stride(targets)?);
    let fits = |page: u64, pages: u32| page.checked_mul(u64::from(pages)).is_some();
    let source_page = shape.page_bytes(sources)?;
    let target_page = shape.page_bytes(targets)?;
    if !fits(source_page, source_pages) || !fits(target_page, target_pages) {
        return Err(PlanError::Unfit);
    }
    let mut rows: Vec<StridedRow> = Vec::new();
    for pair in pages {
        for (page, pages) in [(pair.source, source_pages), (pair.target, target_pages)] {
            if page >= pages {
                return Err(PlanError::NoSuchPage { page, pages });
            }
        }
        let row = StridedRow {
            source: u64::from(pair.source) * source_page + slice.source_part * shape.part_bytes,
            target: u64::from(pair.target) * target_page + slice.target_part * shape.part_bytes,
            source_stride,
            target_stride,
            count: shape.outer,
            length: slice.parts * shape.part_bytes,
        }
        .normal();
        if !rows.last_mut().is_some_and(|last| last.merge(&row)) {
            rows.push(row);
        }
    }
    Ok(rows)
}
