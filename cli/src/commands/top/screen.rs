//! The terminal of `kvctl top`: a screen of its own, which leaves no trace.

use crate::output::several_lines;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, IsTerminal, Read, Write};
use tokio::sync::mpsc::{Receiver, channel};

/// The alternate screen, without a cursor and without line wraps.
const OPEN: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const CLOSE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// To the first line; the rest of each line, and of the screen, is erased as it is written.
const HOME: &str = "\x1b[H";
const ERASE_LINE: &str = "\x1b[K\r\n";
const ERASE_BELOW: &str = "\x1b[J";
/// The height of a terminal that does not tell it.
const USUAL: u16 = 24;

/// The screen. Dropping it restores the terminal, also after an error or a panic.
#[derive(Debug)]
pub(super) struct Screen {
    /// The modes before; `None` if standard input is no terminal.
    before: Option<Termios>,
    keys: Receiver<u8>,
}

impl Screen {
    /// Opens the screen. Keys are neither echoed nor kept until the end of a line; Ctrl-C stays a signal.
    pub(super) fn open() -> io::Result<Self> {
        let stdin = io::stdin();
        let before = match stdin.is_terminal() {
            true => Some(tcgetattr(&stdin)?),
            false => None,
        };
        // From then on the drop restores the changed settings.
        let screen = Self {
            before,
            keys: keys(),
        };
        if let Some(before) = &screen.before {
            let mut modes = before.clone();
            modes.local_modes -= LocalModes::ECHO | LocalModes::ICANON;
            tcsetattr(&stdin, OptionalActions::Now, &modes)?;
        }
        write(OPEN)?;
        Ok(screen)
    }

    /// The number of lines.
    pub(super) fn height(&self) -> usize {
        let size = tcgetwinsize(io::stdout()).map_or(USUAL, |size| size.ws_row);
        usize::from(if size == 0 { USUAL } else { size })
    }

    /// Shows `text`, as much as fits.
    pub(super) fn show(&self, text: &str) -> io::Result<()> {
        let height = self.height();
        let mut frame = HOME.to_owned();
        for (n, line) in several_lines(text).lines().take(height).enumerate() {
            if n > 0 {
                frame.push_str(ERASE_LINE);
            }
            frame.push_str(line);
        }
        frame.push_str("\x1b[K");
        frame.push_str(ERASE_BELOW);
        write(&frame)
    }

    /// Completes when the user presses q.
    pub(super) async fn quit(&mut self) {
        while let Some(key) = self.keys.recv().await {
            if matches!(key, b'q' | b'Q') {
                return;
            }
        }
        std::future::pending().await
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal is gone or broken, so a failure cannot be shown.
        let _ = write(CLOSE);
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// The bytes of standard input if it is a terminal. A thread of its own reads them: the runtime would wait at its end
/// for a read in progress.
fn keys() -> Receiver<u8> {
    let (sender, receiver) = channel(16);
    if io::stdin().is_terminal() {
        std::thread::spawn(move || {
            for key in io::stdin().lock().bytes() {
                let Ok(key) = key else { return };
                if sender.blocking_send(key).is_err() {
                    return;
                }
            }
        });
    }
    receiver
}

fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}
