//! The Unix sockets of this host that may be a node's.
//!
//! The master tells clients where a node's socket is only together with blocks of that node, so that
//! here it is found by its file name, which is the node's unless somebody chose another one.

use std::path::{Path, PathBuf};

/// The flag that a socket has somebody listening on it.
const LISTENING: u32 = 0x1_0000;

/// The sockets that are called like the node and are listened on, of those that the kernel tells in
/// /proc/net/unix.
pub(super) fn of_node(name: &str) -> Vec<PathBuf> {
    let listed = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    called(&listed, name)
}

fn called(listed: &str, name: &str) -> Vec<PathBuf> {
    let file = format!("{name}.sock");
    let mut paths: Vec<PathBuf> = listed
        .lines()
        .filter_map(listening)
        .filter(|path| path.file_name().is_some_and(|name| name == file.as_str()))
        .map(Path::to_owned)
        .collect();
    paths.sort();
    paths.dedup();
    paths
}

/// The path of a line, `Num RefCount Protocol Flags Type St Inode Path`, if somebody listens there.
fn listening(line: &str) -> Option<&Path> {
    let mut rest = line.trim_start();
    let mut flags = 0;
    for column in 0..7 {
        let (field, after) = rest.split_once(' ')?;
        if column == 3 {
            flags = u32::from_str_radix(field, 16).ok()?;
        }
        rest = after.trim_start();
    }
    (flags & LISTENING != 0 && rest.starts_with('/')).then(|| Path::new(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 29671 /run/a b/node-1.sock
0000000000000000: 00000003 00000000 00000000 0001 03 29672 /run/a b/node-1.sock
0000000000000000: 00000002 00000000 00010000 0001 01 29673 /tmp/x/node-1.sock
0000000000000000: 00000002 00000000 00010000 0001 01 29674 /tmp/x/node-11.sock
0000000000000000: 00000002 00000000 00010000 0001 01 29675 @node-1.sock
0000000000000000: 00000003 00000000 00000000 0001 03  7890
";

    #[test]
    fn a_nodes_socket_is_found_by_its_name() {
        let expected = ["/run/a b/node-1.sock", "/tmp/x/node-1.sock"].map(PathBuf::from);
        assert_eq!(called(LISTED, "node-1"), expected);
        assert!(called(LISTED, "node-2").is_empty());
    }
}
