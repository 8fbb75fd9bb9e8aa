//! Memory that bytes are moved from and to.
//!
//! A [`Region`] owns a range of memory and is shared by counting; a [`Slice`] is a part of one. Other
//! processes and threads may change the bytes at any time, so neither ever gives out a `&[u8]`:
//! bytes are copied in and out.
//!
//! ```text
//! Slice ──► Region ──► Arc of { heap block | mapping of a memfd | memory that something else owns }
//!   └─ hook: dropped with the last clone of the slice (a pinned view undoes its pin this way)
//! ```

// UNSAFETY: this module owns raw memory. Every pointer that it forms lies inside the range of one
// `Owned`, which is freed only when the last `Region` that counts it is gone.
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

/// How heap regions are aligned, in bytes: to pages, as devices and mappings like it.
pub const ALIGNMENT: usize = 4096;

/// The total length of scattered memory.
pub fn total_length(slices: &[Slice]) -> Length {
    Length(slices.iter().map(|slice| slice.length().0).sum())
}

/// A range of memory, shared by counting; freed or unmapped when the last clone is gone.
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

/// A region that is not kept: whoever wants to use it asks whether it is still there.
#[derive(Clone, Debug)]
pub(crate) struct WeakRegion(Weak<Owned>);

struct Owned {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
    owner: Owner,
}

/// Who gives the memory back, and how.
enum Owner {
    /// The global allocator, by this layout.
    Heap(Layout),
    /// The kernel: it is a mapping.
    Mapping,
    /// Dropping this does.
    Keeper(#[allow(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>),
    /// Nobody: there is none.
    Nothing,
}

// SAFETY: the memory is owned by this value and its address does not depend on the thread. Bytes
// are only ever copied through raw pointers, so no reference to them is shared between threads.
// What two threads copy in at once may be interleaved; no code here relies on the bytes' values.
unsafe impl Send for Owned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Heap(layout) => {
                // SAFETY: `start` was allocated with exactly this layout, and nobody else frees it.
                unsafe { std::alloc::dealloc(self.start.as_ptr(), *layout) }
            }
            Owner::Mapping => {
                // SAFETY: the range is one whole mapping made in `Region::map`, and the last region
                // that counts it is going, so nothing points into it any more.
                let unmapped =
                    unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
                if let Err(error) = unmapped {
                    tracing::error!(%error, length = self.length, "memory could not be unmapped");
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
    /// Zeroed memory of this process, aligned to [`ALIGNMENT`]. Ends the process when there is none,
    /// like any other allocation.
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

    /// Maps the first `length` bytes of a memfd, shared with all others who map it. A child made by
    /// fork does not inherit the mapping: the node knows who may touch the memory by process.
    ///
    /// Fails as `mmap` does: among others with `EACCES` when `writable` is asked of a read-only
    /// descriptor, and with `InvalidInput` when the length is zero.
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
        // SAFETY: no address is asked for, so no memory that is in use is mapped over.
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

    /// Writable memory that something else owns, such as a Python buffer or memory registered by an
    /// engine; `keeper` is dropped when the last clone is.
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

    /// The whole region.
    pub fn whole(&self) -> Slice {
        Slice {
            region: self.clone(),
            from: 0,
            length: self.owned.length,
            hook: None,
        }
    }

    /// The bytes of the region.
    pub fn length(&self) -> Length {
        Length(self.owned.length as u64)
    }

    /// The same region, without keeping it.
    pub(crate) fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.owned))
    }

    /// Whether bytes may be copied in.
    pub fn is_writable(&self) -> bool {
        self.owned.writable
    }

    /// A part of it; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        self.whole().slice(from, length)
    }

    /// A number that no other region has while this one, or a [`WeakRegion`] of it, is there.
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
    /// Whether anyone still keeps the region.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }

    /// The region, if anyone still keeps it.
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
    /// The bytes of the slice.
    pub fn length(&self) -> Length {
        Length(self.length as u64)
    }

    /// Whether bytes may be copied in.
    pub fn is_writable(&self) -> bool {
        self.region.is_writable()
    }

    /// A part of it, with the same hook; `None` when it does not lie inside.
    pub fn slice(&self, from: Offset, length: Length) -> Option<Slice> {
        let end = from.0.checked_add(length.0)?;
        (end <= self.length().0).then(|| Slice {
            region: self.region.clone(),
            from: self.from + from.as_usize(),
            length: length.as_usize(),
            hook: self.hook.clone(),
        })
    }

    /// The same memory, with something that is dropped when the last clone or part of this slice is.
    #[must_use]
    pub fn with_hook(mut self, hook: Arc<dyn Any + Send + Sync>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Copies bytes out, from `from` on. Panics unless they lie inside.
    pub fn read_at(&self, from: Offset, out: &mut [u8]) {
        self.check(from, out.len());
        // SAFETY: the range lies inside the region, checked above, which lives while `self` does.
        // `out` is borrowed uniquely, so it does not overlap: regions are never lent as references.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.at(from.as_usize()).cast_const(),
                out.as_mut_ptr(),
                out.len(),
            );
        }
    }

    /// Copies bytes in, from `from` on. Panics unless they lie inside a writable region.
    pub fn write_at(&self, from: Offset, bytes: &[u8]) {
        self.check(from, bytes.len());
        assert!(
            self.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: as in `read_at`, with the direction turned; the region is writable, checked above.
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

    /// Copies `length` bytes from `self`, from `from` on, to `target`, from `to` on. Panics unless
    /// both ranges lie inside and the target is writable.
    pub(crate) fn copy_to(&self, from: Offset, target: &Slice, to: Offset, length: usize) {
        self.check(from, length);
        target.check(to, length);
        assert!(
            target.is_writable(),
            "invariant: only writable memory is written"
        );
        // SAFETY: both ranges lie inside living regions, checked above, and the target's is
        // writable. They may overlap when a caller gives parts of one region, so this is `copy`.
        unsafe {
            std::ptr::copy(
                self.at(from.as_usize()).cast_const(),
                target.at(to.as_usize()),
                length,
            );
        }
    }

    /// Like [`Slice::copy_to`], past the caches: for a target that is not read soon. What comes after
    /// [`streaming::fence`] is seen by others after the bytes.
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
        // SAFETY: both ranges lie inside living regions and the target's is writable, checked above;
        // they are further apart than they are long.
        unsafe { streaming::copy(start.cast_const(), end, length) };
    }

    /// The region that it is a part of.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// The address of the slice's first byte: for the calls that hand memory to the kernel, for summing
    /// a caller's own memory, and for lending a view out to a language with pointers of its own. Reading
    /// through it is for who knows that a clone of the slice lives and that nobody writes meanwhile.
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
