//! Memory that transfers read and write.
//!
//! A [`Region`] owns a range of memory and is reference counted. A [`Slice`] is a part of a region.
//! Other processes and threads may change the bytes at any time, so neither type lends a `&[u8]`:
//! bytes are copied in and out.
//!
//! ```text
//! Slice ──► Region ──► Arc of { heap block | mapping of a memfd | memory with a keeper }
//!   └─ hook: dropped with the last clone of the slice (this removes the pin of a view)
//! ```

// UNSAFETY: this module owns raw memory. Every pointer that it forms lies inside the range of one
// `Owned`, which is freed with the last `Region` over it.
#![allow(
    unsafe_code,
    reason = "owns raw memory behind a safe, copying interface"
)]

mod own_process;
mod populate;
mod segment;
pub(crate) mod streaming;

pub(crate) use own_process::OwnProcess;
pub(crate) use populate::{Populate, populate_step};
pub(crate) use segment::create_small;
pub use segment::{create_segment, read_only_fd};

use kvpool_types::{Length, Offset};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

/// The alignment of heap regions, in bytes. Devices and mappings work in pages.
pub const ALIGNMENT: usize = 4096;

/// The total length of the slices, in bytes.
pub fn total_length(slices: &[Slice]) -> Length {
    Length(slices.iter().map(|slice| slice.length().0).sum())
}

/// A reference-counted range of memory. The last clone frees or unmaps it.
#[derive(Clone, Debug)]
pub struct Region {
    owned: Arc<Owned>,
}

/// A part of a region.
#[derive(Clone)]
pub struct Slice {
    region: Region,
    from: usize,
    length: usize,
    hook: Option<Arc<dyn Any + Send + Sync>>,
}

/// A weak reference to a region.
#[derive(Clone, Debug)]
pub(crate) struct WeakRegion(Weak<Owned>);

struct Owned {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
    owner: Owner,
}

/// How the memory is freed.
enum Owner {
    /// Allocated from the global allocator with this layout.
    Heap(Layout),
    /// Mapped by the kernel.
    Mapping,
    /// Owned by the keeper, which is dropped.
    Keeper(#[allow(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>),
    /// Empty: there is nothing to free.
    Nothing,
}

// SAFETY: this value owns the memory, whose address does not depend on the thread. Bytes are only
// copied through raw pointers, so threads share no reference to them. Concurrent copies may
// interleave; no code here relies on the bytes' values.
unsafe impl Send for Owned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Heap(layout) => {
                // SAFETY: `start` was allocated with exactly this layout, and nothing else frees
                // it.
                unsafe { std::alloc::dealloc(self.start.as_ptr(), *layout) }
            }
            Owner::Mapping => {
                // SAFETY: the range is one whole mapping made in `Region::map`. Its last region is
                // being dropped, so nothing points into it any more.
                let unmapped =
                    unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
                if let Err(error) = unmapped {
                    tracing::error!(%error, length = self.length, "unmapping memory failed");
                }
            }
            Owner::Keeper(_) | Owner::Nothing => {}
        }
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.owner {
            Owner::Heap(_) => "heap",
            Owner::Mapping => "mapping",
            Owner::Keeper(_) => "foreign",
            Owner::Nothing => "empty",
        };
        write!(f, "{kind} {:p}+{}", self.start, self.length)
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{}+{}]", self.region.owned, self.from, self.length)
    }
}

impl Region {
    /// Allocates zeroed memory, aligned to [`ALIGNMENT`]. Aborts the process when memory is
    /// exhausted, like any other allocation.
    pub fn allocate(length: Length) -> Self {
        let length = length.as_usize();
        if length == 0 {
            return Self::empty();
        }
        let layout = Layout::from_size_align(length, ALIGNMENT)
            .expect("invariant: lengths fit the address space");
        // SAFETY: the layout is not of size zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            std::alloc::handle_alloc_error(layout)
        };
        Self::new(start, length, true, Owner::Heap(layout))
    }

    /// Maps the first `length` bytes of a memfd, shared with every process that maps it. A child
    /// made by fork does not inherit the mapping, because the node tracks by process who may touch
    /// the memory.
    ///
    /// # Errors
    ///
    /// As `mmap`: `EACCES` when `writable` is asked of a read-only descriptor, and `InvalidInput`
    /// when the length is zero.
    pub fn map(fd: BorrowedFd<'_>, length: Length, writable: bool) -> io::Result<Self> {
        let region = Self::map_inherited(fd, length, writable)?;
        // SAFETY: the range is the mapping that was just made; the advice changes no byte of it.
        unsafe {
            rustix::mm::madvise(
                region.start().as_ptr().cast(),
                region.owned.length,
                Advice::LinuxDontFork,
            )
        }?;
        Ok(region)
    }

    /// Like [`Region::map`], but a child made by fork has the mapping too.
    fn map_inherited(fd: BorrowedFd<'_>, length: Length, writable: bool) -> io::Result<Self> {
        let length = length.as_usize();
        if length == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a mapping has at least one byte",
            ));
        }
        let protection = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: no address is asked for, so the kernel maps over no memory in use.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("the kernel mapped the null page"))?;
        Ok(Self::new(start, length, writable, Owner::Mapping))
    }

    /// Writable memory with another owner, such as a Python buffer or memory registered by an
    /// engine. `keeper` is dropped with the last clone.
    ///
    /// # Safety
    ///
    /// From `start` on, `length` bytes must stay readable and writable until `keeper` is dropped,
    /// and no Rust reference to them may be used while the region lives.
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        length: Length,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(start, length.as_usize(), true, Owner::Keeper(keeper))
    }

    /// A slice of the whole region.
    pub fn whole(&self) -> Slice {
        Slice {
            region: self.clone(),
            from: 0,
            length: self.owned.length,
            hook: None,
        }
    }

    /// The length in bytes.
    pub fn length(&self) -> Length {
        Length(self.owned.length as u64)
    }

    /// A weak reference to the same region.
    pub(crate) fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.owned))
    }

    /// Whether bytes may be copied in.
    pub fn is_writable(&self) -> bool {
        self.owned.writable
    }

    /// A part of the region; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        self.whole().slice(from, length)
    }

    /// A number that is unique among regions as long as this region, or a [`WeakRegion`] of it, exists.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.owned).addr()
    }

    fn new(start: NonNull<u8>, length: usize, writable: bool, owner: Owner) -> Self {
        Self {
            owned: Arc::new(Owned {
                start,
                length,
                writable,
                owner,
            }),
        }
    }

    fn empty() -> Self {
        Self::new(NonNull::dangling(), 0, true, Owner::Nothing)
    }

    fn start(&self) -> NonNull<u8> {
        self.owned.start
    }
}

impl WeakRegion {
    /// Whether a strong reference still exists.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// The region, if a strong reference still exists.
    pub(crate) fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(|owned| Region { owned })
    }
}

impl From<Vec<u8>> for Region {
    fn from(bytes: Vec<u8>) -> Self {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let Ok(layout) = Layout::array::<u8>(bytes.capacity()) else {
            unreachable!("invariant: a vector's capacity has a layout")
        };
        if layout.size() == 0 {
            return Self::empty();
        }
        let start =
            NonNull::new(bytes.as_mut_ptr()).expect("invariant: a vector's pointer is never null");
        Self::new(start, bytes.len(), true, Owner::Heap(layout))
    }
}

impl Slice {
    /// The length in bytes.
    pub fn length(&self) -> Length {
        Length(self.length as u64)
    }

    /// Whether bytes may be copied in.
    pub fn is_writable(&self) -> bool {
        self.region.is_writable()
    }

    /// A part of the slice, with the same hook; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        let end = from.0.checked_add(length.0)?;
        (end <= self.length().0).then(|| Slice {
            region: self.region.clone(),
            from: self.from + from.as_usize(),
            length: length.as_usize(),
            hook: self.hook.clone(),
        })
    }

    /// The same memory with a hook. The hook is dropped with the last clone or part of this slice.
    #[must_use]
    pub fn with_hook(mut self, hook: Arc<dyn Any + Send + Sync>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Copies bytes out, starting at `from`.
    ///
    /// # Panics
    ///
    /// Panics unless the range lies inside the slice.
    pub fn read_at(&self, from: Offset, out: &mut [u8]) {
        self.check(from, out.len());
        // SAFETY: the range lies inside the region, checked above, and `self` keeps the region
        // alive. `out` is borrowed uniquely and regions are never lent as references, so the two do
        // not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.at(from.as_usize()).cast_const(),
                out.as_mut_ptr(),
                out.len(),
            );
        }
    }

    /// Copies bytes in, starting at `from`.
    ///
    /// # Panics
    ///
    /// Panics unless the range lies inside a writable slice.
    pub fn write_at(&self, from: Offset, bytes: &[u8]) {
        self.check(from, bytes.len());
        assert!(
            self.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: as in `read_at`, in the other direction. The region is writable, checked above.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(from.as_usize()), bytes.len());
        }
    }

    /// Copies all bytes out.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.length];
        self.read_at(Offset(0), &mut out);
        out
    }

    /// Copies `length` bytes from offset `from` of `self` to offset `to` of `target`. Panics unless
    /// both ranges lie inside and the target is writable.
    pub(crate) fn copy_to(&self, from: Offset, target: &Slice, to: Offset, length: usize) {
        self.check(from, length);
        target.check(to, length);
        assert!(
            target.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: both ranges lie inside living regions, checked above, and the target is writable.
        // The ranges may overlap when a caller passes parts of one region, so this is `copy`.
        unsafe {
            std::ptr::copy(
                self.at(from.as_usize()).cast_const(),
                target.at(to.as_usize()),
                length,
            );
        }
    }

    /// [`Slice::copy_to`] with stores that bypass the caches, for a target that is not read soon. Other
    /// threads see the bytes before anything written after [`streaming::fence`].
    pub(crate) fn stream_to(&self, from: Offset, target: &Slice, to: Offset, length: usize) {
        let (start, end) = (self.at(from.as_usize()), target.at(to.as_usize()));
        if start.addr().abs_diff(end.addr()) < length {
            return self.copy_to(from, target, to, length);
        }
        self.check(from, length);
        target.check(to, length);
        assert!(
            target.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: both ranges lie inside living regions and the target is writable, checked above.
        // The distance between them exceeds their length.
        unsafe { streaming::copy(start.cast_const(), end, length) };
    }

    /// [`Slice::write_at`] with stores that bypass the caches, as [`Slice::stream_to`] has them. `bytes` are not
    /// a part of the slice.
    pub(crate) fn stream_at(&self, from: Offset, bytes: &[u8]) {
        self.check(from, bytes.len());
        assert!(
            self.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: the range lies inside a living, writable region, checked above. `bytes` are borrowed, so
        // nothing else writes them, and the range is no part of them.
        unsafe { streaming::copy(bytes.as_ptr(), self.at(from.as_usize()), bytes.len()) };
    }

    /// The region of the slice.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// The address of the first byte. System calls that take memory need it, and checksums of a
    /// caller's private memory. So do views for a language with pointers of its own, and the search
    /// for buffers that overlap.
    /// Reading through it requires that a clone of the slice lives and that nobody writes
    /// meanwhile.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at(0)
    }

    /// The address of `length` bytes from `from` on. Panics unless they lie inside.
    pub(crate) fn range(&self, from: Offset, length: Length) -> *mut u8 {
        self.check(from, length.as_usize());
        self.at(from.as_usize())
    }

    fn at(&self, from: usize) -> *mut u8 {
        self.region
            .start()
            .as_ptr()
            .wrapping_add(self.from)
            .wrapping_add(from)
    }

    fn check(&self, from: Offset, length: usize) {
        let inside = from
            .0
            .checked_add(length as u64)
            .is_some_and(|end| end <= self.length as u64);
        assert!(
            inside,
            "invariant: {length} bytes from {from} lie inside a slice of {}",
            self.length
        );
    }
}

#[cfg(test)]
mod tests;
