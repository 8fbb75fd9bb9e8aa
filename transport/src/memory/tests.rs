use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn allocated_memory_is_zeroed_and_aligned() {
    let region = Region::allocate(Length(10_000));
    assert_eq!(region.whole().to_vec(), vec![0; 10_000]);
    assert_eq!(region.whole().as_ptr().addr() % ALIGNMENT, 0);
    assert_eq!(Region::allocate(Length(0)).length(), Length(0));
}

#[test]
fn a_vector_keeps_its_bytes() {
    let mut bytes = Vec::with_capacity(100);
    bytes.extend_from_slice(b"abc");
    let region = Region::from(bytes);
    assert_eq!(region.length(), Length(3));
    assert_eq!(region.whole().to_vec(), b"abc");
    assert_eq!(Region::from(Vec::new()).length(), Length(0));
}

#[test]
fn parts_lie_inside_or_are_none() {
    let region = Region::from((0..100).collect::<Vec<u8>>());
    let part = region.slice(Offset(10), Length(20)).unwrap();
    assert_eq!(part.to_vec(), (10..30).collect::<Vec<u8>>());
    let inner = part.slice(Offset(5), Length(15)).unwrap();
    assert_eq!(inner.to_vec(), (15..30).collect::<Vec<u8>>());
    assert!(part.slice(Offset(5), Length(16)).is_none());
    assert!(part.slice(Offset(u64::MAX), Length(2)).is_none());
    assert!(region.slice(Offset(0), Length(101)).is_none());
}

#[test]
fn bytes_are_copied_in_and_out() {
    let region = Region::allocate(Length(100));
    let part = region.slice(Offset(50), Length(10)).unwrap();
    part.write_at(Offset(2), b"hello");
    let mut out = [0; 5];
    region.whole().read_at(Offset(52), &mut out);
    assert_eq!(&out, b"hello");
    let other = Region::allocate(Length(8));
    part.copy_to(Offset(2), &other.whole(), Offset(3), 5);
    assert_eq!(other.whole().to_vec(), b"\0\0\0hello");
}

#[test]
#[should_panic(expected = "lie inside")]
fn reading_past_the_end_panics() {
    Region::allocate(Length(10))
        .slice(Offset(0), Length(5))
        .unwrap()
        .read_at(Offset(1), &mut [0; 5]);
}

#[test]
#[should_panic(expected = "writable")]
fn writing_read_only_memory_panics() {
    let (fd, _region) = create_segment(Length(4096), false, "kvpool-test").unwrap();
    let view = Region::map(std::os::fd::AsFd::as_fd(&fd), Length(4096), false).unwrap();
    view.whole().write_at(Offset(0), b"x");
}

#[test]
fn a_hook_is_dropped_with_the_last_part() {
    let drops = Arc::new(AtomicUsize::new(0));
    let whole = Region::allocate(Length(10))
        .whole()
        .with_hook(Arc::new(Counted(drops.clone())));
    let part = whole.slice(Offset(1), Length(2)).unwrap();
    let clone = part.clone();
    drop(whole);
    drop(part);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(clone);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn foreign_memory_is_kept_while_in_use() {
    let drops = Arc::new(AtomicUsize::new(0));
    let mut bytes = *b"foreign";
    // SAFETY: `bytes` outlives the region, which is dropped below, and is not used meanwhile.
    let region = unsafe {
        Region::from_raw(
            NonNull::from(&mut bytes).cast(),
            Length(7),
            Arc::new(Counted(drops.clone())),
        )
    };
    let part = region.slice(Offset(0), Length(3)).unwrap();
    drop(region);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    assert_eq!(part.to_vec(), b"for");
    drop(part);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}
