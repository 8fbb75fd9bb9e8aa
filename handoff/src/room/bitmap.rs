//! The pages and layers of a room that have arrived from one sender.

use super::PageRectangle;

/// A bit for each page and layer of a rectangle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellBitmap {
    whole: PageRectangle,
    words: Vec<u64>,
    left: u64,
}

impl CellBitmap {
    /// A bitmap in which no cell has arrived.
    pub fn new(whole: PageRectangle) -> Self {
        let cells = whole.cells();
        let words = usize::try_from(cells.div_ceil(64)).expect("invariant: a room fits in memory");
        Self {
            whole,
            words: vec![0; words],
            left: cells,
        }
    }

    /// Whether every cell has arrived.
    pub const fn is_full(&self) -> bool {
        self.left == 0
    }

    /// The number of cells that have not arrived.
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Marks a rectangle. Returns false, and changes nothing, when a part of the rectangle lies outside or has
    /// arrived before.
    pub fn mark(&mut self, rectangle: &PageRectangle) -> bool {
        let is_fresh = self.whole.contains(rectangle)
            && !rectangle.is_empty()
            && cells(&self.whole, rectangle).all(|cell| !self.is_set(cell));
        if !is_fresh {
            return false;
        }
        for cell in cells(&self.whole, rectangle) {
            if let Some(word) = self.words.get_mut(cell / 64) {
                *word |= 1 << (cell % 64);
            }
        }
        self.left -= rectangle.cells();
        true
    }

    fn is_set(&self, cell: usize) -> bool {
        self.words
            .get(cell / 64)
            .is_some_and(|word| word >> (cell % 64) & 1 == 1)
    }
}

fn cells<'a>(
    whole: &'a PageRectangle,
    rectangle: &'a PageRectangle,
) -> impl Iterator<Item = usize> + 'a {
    let layers = whole.layers.len();
    rectangle.pages.clone().flat_map(move |page| {
        let row = (page - whole.pages.start) as usize * layers;
        let begin = whole.layers.start;
        let of_page = rectangle.layers.clone();
        of_page.map(move |layer| row + (layer - begin) as usize)
    })
}
