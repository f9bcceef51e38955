// Preloaded into a program, makes it a zygote of lib/zygote.py: what comes before main is done once,
// and each fork runs main with its own arguments, environment and files.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*Main)(int, char**, char**);

static Main program;
static char message[1 << 20];
static ssize_t size;
static int files[4];  // standard input, output and error, and whom to tell of it

static int Receive(int from) {
  union {
    char space[CMSG_SPACE(sizeof(files))];
    struct cmsghdr align;
  } control;
  struct iovec data = {message, sizeof(message)};
  struct msghdr header = {.msg_iov = &data,
                          .msg_iovlen = 1,
                          .msg_control = control.space,
                          .msg_controllen = sizeof(control)};
  size = recvmsg(from, &header, MSG_CMSG_CLOEXEC);
  if (size <= 0) return 0;
  memcpy(files, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof(files));
  return 1;
}

static char* Next(char* text) { return text + strlen(text) + 1; }

// The message: the folder, the number of arguments, these, and the environment.
static int Run(void) {
  for (int i = 0; i < 4; ++i) {
    if (i < 3) dup2(files[i], i);
    close(files[i]);
  }
  char* text = Next(message);
  const int arguments = atoi(text);
  char** lines = calloc(size + 2, sizeof(char*));  // more than there are strings, each with its end
  char** next = lines;
  for (text = Next(text); text < message + size; text = Next(text)) {
    *next++ = text;
    if (next - lines == arguments) ++next;
  }
  environ = lines + arguments + 1;
  if (chdir(message) != 0) abort();
  return program(arguments, lines, environ);
}

static int Zygote(int argc, char** argv, char** envp) {
  (void)argc, (void)envp;
  const int requests = atoi(argv[1]);
  signal(SIGCHLD, SIG_IGN);
  if (write(requests, "", 1) != 1) return 1;
  while (Receive(requests)) {
    if (fork() == 0) {
      // Waits for the program, so that the zygote need not.
      signal(SIGCHLD, SIG_DFL);
      close(requests);
      const pid_t pid = fork();
      if (pid == 0) return Run();
      for (int i = 0; i < 3; ++i) close(files[i]);
      int status;
      if (write(files[3], &pid, sizeof(pid)) < 0 || waitpid(pid, &status, 0) < 0) abort();
      _exit(write(files[3], &status, sizeof(status)) < 0);
    }
    for (int i = 0; i < 4; ++i) close(files[i]);
  }
  return 0;
}

int __libc_start_main(Main main, int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void* stack_end) {
  program = main;
  typeof(&__libc_start_main) next = (typeof(next))dlsym(RTLD_NEXT, "__libc_start_main");
  return next(Zygote, argc, argv, init, fini, rtld_fini, stack_end);
}
